"""What the modules of opkiln.nn have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar


class Served:
    """First base of a module whose second base is torch.nn's class of the same name.

    op: python name of the op. serve(module, input, *, backend): torch's forward with opkiln's op in
    it; it reads only what torch's class has, so that `opkiln.replace` can give it to torch's own
    modules.
    """

    op: ClassVar[str]
    serve: ClassVar[Callable[..., Any]]
    backend: str | None

    def __init__(self, *args: Any, backend: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.backend = backend

    def forward(self, input: Any) -> Any:
        return self.serve(input, backend=self.backend)

    def extra_repr(self) -> str:
        text: str = super().extra_repr()  # type: ignore[misc]  # torch.nn's class comes next
        return text if self.backend is None else f"{text}, backend={self.backend!r}"
