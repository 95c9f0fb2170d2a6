"""All losses by name: the declarations in the modules of losses/. A new module there is found without an entry here."""

from importlib import import_module
from pkgutil import iter_modules

from training.objectives import losses
from training.objectives.loss import Loss

_MODULES = [import_module(f"{losses.__name__}.{found.name}") for found in iter_modules(losses.__path__)]
_DECLARED = [value for module in _MODULES for value in vars(module).values() if isinstance(value, Loss)]
LOSSES: dict[str, Loss] = {loss.name: loss for loss in sorted(_DECLARED, key=lambda loss: loss.name)}
