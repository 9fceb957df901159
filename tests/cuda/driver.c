// A CUDA driver without a GPU, for tests: what Numba asks for of libcuda.so.1. The device's memory is the process's own.
// Launches go to the function given to `launch_by`, with the kernel's name and arguments. Launches and asynchronous copies
// are done as late as CUDA allows, when somebody waits: so a test sees what is read too early, or freed too early.
// Names, arguments and numbers are those of cuda.h, CUDA 12.9.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef void *Handle;
typedef uint64_t Address;
typedef int (*Launch)(const char *name, unsigned blocks, unsigned threads, void **arguments);

enum { SUCCESS = 0, OUT_OF_MEMORY = 2, NOT_FOUND = 500, LAUNCH_FAILED = 719 };
enum { THREADS_PER_BLOCK = 1, WARP_SIZE = 10, PROCESSORS = 16, MAJOR = 75, MINOR = 76 };

static Launch launch;
static int the_context;
static __thread Handle contexts[16];
static __thread int depth;

void launch_by(Launch function) { launch = function; }

enum Kind { COPY, LAUNCH, FREE };
struct Task {
    enum Kind kind;
    const char *kernel;
    Address to, from;
    size_t size;
    unsigned blocks, threads;
    int64_t table, rows;
};
static struct Task *tasks; // from `first` to `last`
static size_t first, last, room;
static int failed;
static __thread int running; // what a launch calls may free memory
static pthread_mutex_t queue = PTHREAD_MUTEX_INITIALIZER, run = PTHREAD_MUTEX_INITIALIZER;

static int later(struct Task task) {
    pthread_mutex_lock(&queue);
    if (first == last)
        first = last = 0;
    if (last == room)
        tasks = realloc(tasks, (room = 2 * room + 64) * sizeof *tasks);
    tasks[last++] = task;
    pthread_mutex_unlock(&queue);
    return SUCCESS;
}
static int copy_later(Address to, Address from, size_t size) {
    return later((struct Task){.kind = COPY, .to = to, .from = from, .size = size});
}
static int free_later(Address address) { return later((struct Task){.kind = FREE, .to = address}); }
static int launch_later(Handle kernel, unsigned blocks, unsigned threads, void **arguments) {
    return later((struct Task){.kind = LAUNCH, .kernel = kernel, .blocks = blocks, .threads = threads,
                               .table = *(int64_t *)arguments[0], .rows = *(int64_t *)arguments[1]});
}
static int next(struct Task *task) {
    pthread_mutex_lock(&queue);
    int found = first < last;
    if (found)
        *task = tasks[first++];
    pthread_mutex_unlock(&queue);
    return found;
}
static int finish(void) {
    if (running)
        return failed;
    pthread_mutex_lock(&run);
    running = 1;
    for (struct Task task; next(&task);) {
        void *arguments[] = {&task.table, &task.rows};
        if (task.kind == COPY)
            memmove((void *)task.to, (void *)task.from, task.size);
        else if (task.kind == FREE)
            free((void *)task.to);
        else if (launch && launch(task.kernel, task.blocks, task.threads, arguments))
            failed = LAUNCH_FAILED;
    }
    running = 0;
    pthread_mutex_unlock(&run);
    return failed;
}

int cuInit(unsigned flags) { return SUCCESS; }
int cuDriverGetVersion(int *version) { return *version = 12090, SUCCESS; }
int cuDeviceGet(int *device, int number) { return *device = number, SUCCESS; }
int cuDeviceGetCount(int *count) { return *count = 1, SUCCESS; }
int cuDeviceGetName(char *name, int size, int device) { return strncpy(name, "none", size), SUCCESS; }
int cuDeviceGetUuid(void *uuid, int device) { return memset(uuid, 1, 16), SUCCESS; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
    case THREADS_PER_BLOCK: *value = 1024; break;
    case WARP_SIZE: *value = 32; break;
    case PROCESSORS: *value = 132; break;
    case MAJOR: *value = 9; break;
    case MINOR: *value = 0; break;
    default: *value = 1;
    }
    return SUCCESS;
}

int cuDevicePrimaryCtxRetain(Handle *context, int device) { return *context = &the_context, SUCCESS; }
int cuDevicePrimaryCtxRelease(int device) { return SUCCESS; }
int cuCtxGetCurrent(Handle *context) { return *context = depth ? contexts[depth - 1] : NULL, SUCCESS; }
int cuCtxSetCurrent(Handle context) { return contexts[depth ? depth - 1 : depth++] = context, SUCCESS; }
int cuCtxPushCurrent(Handle context) { return contexts[depth++] = context, SUCCESS; }
int cuCtxPopCurrent(Handle *context) { return *context = contexts[--depth], SUCCESS; }
int cuCtxGetDevice(int *device) { return *device = 0, SUCCESS; }
int cuCtxSynchronize(void) { return finish(); }

int cuMemGetInfo(size_t *free_bytes, size_t *total) { return *free_bytes = *total = 1ul << 34, SUCCESS; }
int cuMemHostAlloc(void **memory, size_t size, unsigned flags) {
    return posix_memalign(memory, 512, size) ? OUT_OF_MEMORY : SUCCESS;
}
int cuMemAlloc(Address *address, size_t size) { return cuMemHostAlloc((void **)address, size, 0); }
int cuMemFreeHost(void *memory) { return free_later((Address)memory); }
int cuMemFree(Address address) { return free_later(address); }
int cuMemHostGetDevicePointer(Address *address, void *memory, unsigned flags) {
    return *address = (Address)memory, SUCCESS;
}
int cuMemcpyHtoD(Address to, const void *from, size_t size) { return copy_later(to, (Address)from, size), finish(); }
int cuMemcpyDtoH(void *to, Address from, size_t size) { return copy_later((Address)to, from, size), finish(); }
int cuMemcpyDtoD(Address to, Address from, size_t size) { return copy_later(to, from, size); }
int cuMemcpyHtoDAsync(Address to, const void *from, size_t size, Handle stream) {
    return copy_later(to, (Address)from, size);
}
int cuMemcpyDtoHAsync(void *to, Address from, size_t size, Handle stream) {
    return copy_later((Address)to, from, size);
}
int cuMemcpyDtoDAsync(Address to, Address from, size_t size, Handle stream) { return copy_later(to, from, size); }

int cuPointerGetAttribute(void *value, int attribute, Address address) {
    return attribute == 1 ? (*(Handle *)value = &the_context, SUCCESS) : NOT_FOUND;
}

int cuStreamSynchronize(Handle stream) { return finish(); }
int cuEventCreate(Handle *event, unsigned flags) { return *event = malloc(1), SUCCESS; }
int cuEventDestroy(Handle event) { return free(event), SUCCESS; }
int cuEventRecord(Handle event, Handle stream) { return SUCCESS; }
int cuEventQuery(Handle event) { return finish(); }
int cuEventSynchronize(Handle event) { return finish(); }

int cuLibraryLoadData(Handle *library, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
    return *library = malloc(1), SUCCESS;
}
int cuLibraryUnload(Handle library) { return free(library), SUCCESS; }
int cuLibraryGetKernel(Handle *kernel, Handle library, const char *name) { return *kernel = strdup(name), SUCCESS; }
int cuKernelGetAttribute(int *value, int attribute, Handle kernel, int device) { return *value = 1024, SUCCESS; }

struct Configuration {
    unsigned blocks, blocks_y, blocks_z, threads, threads_y, threads_z, shared;
};
int cuLaunchKernel(Handle kernel, unsigned blocks, unsigned blocks_y, unsigned blocks_z, unsigned threads,
                   unsigned threads_y, unsigned threads_z, unsigned shared, Handle stream, void **arguments,
                   void **extra) {
    return launch_later(kernel, blocks, threads, arguments);
}
int cuLaunchKernelEx(const struct Configuration *configuration, Handle kernel, void **arguments, void **extra) {
    return launch_later(kernel, configuration->blocks, configuration->threads, arguments);
}

int cuGetErrorName(int error, const char **name) { return *name = "AN_ERROR", SUCCESS; }
int cuGetErrorString(int error, const char **text) { return *text = "an error", SUCCESS; }
int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, void *status) {
    Dl_info self;
    dladdr((void *)cuInit, &self);
    *function = dlsym(dlopen(self.dli_fname, RTLD_LAZY), name);
    return *function ? SUCCESS : NOT_FOUND;
}
