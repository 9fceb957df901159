"""The library's recipes, but for ``robust``, whose warm-up is exact unless a study is about another one: most studies
were run when that was the default."""

from dataclasses import replace

from horovod_onebit.recipe import PRESETS as OF_LIBRARY

PRESETS = OF_LIBRARY | {"robust": replace(OF_LIBRARY["robust"], warmup="exact")}
