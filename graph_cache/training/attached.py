"""A module whose calls are taken over, and what of it a capture bakes in beside the arguments of a call.

Owns the seam: the attribute of the module that is replaced, and put back at the end. Knows no graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from graph_cache.errors import GraphConfigError
from graph_cache.training.compiled import COMPILED_CALL, is_compiled

FORWARD = "forward"
MARK = "takes_over_a_module"


class AttachedModule:
    """A module under `name`; `eager` is what its calls did before: a forward, or what `module.compile()` made of it.

    Raises GraphConfigError where its forward is replaced already.
    """

    def __init__(self, name: str, module: nn.Module):
        self.name = name
        self.module = module
        self.compiled = is_compiled(module)
        # module.compile() wraps hooks and forward together, so that call is taken over; torch.compile(module) makes a
        # module around it, whose forward is the compiled call.
        self._seam = COMPILED_CALL if getattr(module, COMPILED_CALL, None) is not None else FORWARD
        self._before = vars(module).get(self._seam)
        if self._seam == FORWARD and self._before is not None and not self.compiled:
            raise GraphConfigError(f"{name}: its forward is replaced already ({self._before!r}); detach whatever did "
                                   "so first")
        if getattr(self._before, MARK, False):
            raise GraphConfigError(f"{name}: it is attached already; detach it first")
        self.eager: Callable[..., Any] = getattr(module, self._seam)
        self.refused: set[Hashable] = set()  # kinds of calls whose capture failed
        self.handing_out: Any = None  # the pair that hands out its gradients where they are; others copy
        self.parameters = list(module.parameters())
        self.submodules = list(module.modules())
        inner = self.submodules if self._seam == COMPILED_CALL else self.submodules[1:]
        self.hooks = [hooks for one in inner for hooks in (one._forward_hooks, one._forward_pre_hooks,
                                                            one._backward_hooks, one._backward_pre_hooks)]
        self.refresh()

    def take_over(self, call: Callable[..., Any]) -> None:
        """From here on calls of the module are calls of this."""
        setattr(call, MARK, True)
        setattr(self.module, self._seam, call)

    def give_back(self) -> None:
        """The module as it was."""
        if self._before is None:
            delattr(self.module, self._seam)
        else:
            setattr(self.module, self._seam, self._before)

    def refresh(self) -> None:
        """Look again at what may change between two steps: which parameters are frozen, modes of submodules, hooks."""
        self.hooks_inside = any(self.hooks)  # a replay would leave them out
        trained = [parameter.requires_grad for parameter in self.parameters]
        self.frozen = True not in trained
        self.state = (self.hooks_inside, *trained, *[module.training for module in self.submodules])

    def wants_gradients(self, tensors: list[Tensor]) -> bool:
        """Whether a call with these tensors has anything to differentiate."""
        return not self.frozen or any(tensor.requires_grad for tensor in tensors)


class Watched:
    """What may change of attached modules between two steps, looked at all at once: in C loops, at every step."""

    def __init__(self, modules: Sequence[AttachedModule]):
        self._modules = modules
        self._parameters = [parameter for attached in modules for parameter in attached.parameters]
        self._submodules = [module for attached in modules for module in attached.submodules]
        self._hooks = [hooks for attached in modules for hooks in attached.hooks]
        self._seen: tuple[list[bool], list[bool]] = ([], [])

    def refresh(self) -> None:
        """Bring the state of each module up to date."""
        now = list(map(_requires_grad, self._parameters)), list(map(_training, self._submodules))
        if now != self._seen or any(self._hooks):
            self._seen = now
            for attached in self._modules:
                attached.refresh()


_requires_grad, _training = attrgetter("requires_grad"), attrgetter("training")
