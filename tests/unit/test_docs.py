"""The README and the pages of docs/: what a reader needs is there, and what they link to exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "horovod_onebit"
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]


def without_code(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchor(heading):
    """A heading's anchor, as GitHub and MyST make it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page):
    return {anchor(heading) for heading in re.findall(r"^#+ (.+)$", without_code(page.read_text()), re.MULTILINE)}


def test_the_readme_is_short():
    lines = README.splitlines()
    assert len(lines) <= 120
    longest = run = 0
    for line in lines:
        if line.startswith("- "):
            run += 1
            longest = max(longest, run)
        elif not line.startswith("  "):
            run = 0
    assert longest <= 7


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_exist(page):
    for target in re.findall(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)", without_code(page.read_text())):
        if re.match(r"https?:|mailto:", target):
            continue
        name, _, heading = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name}: there is no {target}"
        assert not heading or heading in anchors(path), f"{page.name}: {target} is no heading of {path.name}"


@pytest.mark.parametrize(
    ("question", "page", "answer"),
    [
        ("clip", "gradients.md", "clip_grad_norm_"),
        ("resume", "checkpoints.md", "load_checkpoint"),
        ("on my network", "decisions.md", "10 Gbit/s"),
        ("error", "faults.md", "DesyncError"),
        ("install", "install.md", "conda-forge"),
    ],
)
def test_the_readme_leads_from_a_question_to_its_answer(question, page, answer):
    rows = [line for line in README.splitlines() if line.startswith("|") and f"(docs/{page})" in line]
    assert any(question in row for row in rows)
    assert answer in (DOCS / page).read_text()


def exported(module):
    """The names in ``__all__`` of a package."""
    for node in ast.parse((PACKAGE / module / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError(module)


@pytest.mark.parametrize("module", [".", "torch", "tf"])
def test_the_reference_has_every_public_name(module):
    api = (DOCS / "api.md").read_text()
    of_errors = (PACKAGE / "errors.py").read_text()
    for name in exported(module):
        assert re.search(rf"\b{name}\b", api) or f"class {name}(" in of_errors, name


def documented():
    """Every function and class that the reference names, as source and docstring."""
    for path in re.findall(r"auto(?:function|class):: horovod_onebit\.([\w.]+)", (DOCS / "api.md").read_text()):
        module, _, name = path.rpartition(".")
        base = PACKAGE.joinpath(*module.split(".")) if module else PACKAGE
        files = [base.with_suffix(".py"), base / "__init__.py", *sorted(base.glob("*.py"))]
        for file in (file for file in files if file.exists()):
            found = [node for node in ast.parse(file.read_text()).body if getattr(node, "name", "") == name]
            if found:
                yield path, found[0]
                break


def of_callbacks():
    module = ast.parse((PACKAGE / "tf" / "callbacks.py").read_text())
    for node in module.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield f"tf.callbacks.{node.name}", node


EVERYTHING = [*documented(), *of_callbacks()]


@pytest.mark.parametrize(("path", "node"), EVERYTHING, ids=[path for path, _ in EVERYTHING])
def test_the_reference_explains_every_argument(path, node):
    of_horovod = re.search(r"^## Arguments that.*?^## ", (DOCS / "api.md").read_text(), re.MULTILINE | re.DOTALL)[0]
    text = (ast.get_docstring(node) or "") + of_horovod
    if isinstance(node, ast.ClassDef):
        functions = [item for item in node.body if getattr(item, "name", "") == "__init__"]
    else:
        functions = [node]
    for function in functions:
        arguments = function.args
        for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
            if argument.arg != "self":
                assert re.search(rf"\b{argument.arg}\b", text), f"{path}: {argument.arg} is not explained"
