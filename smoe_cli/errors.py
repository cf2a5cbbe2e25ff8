"""The error tree. Each error has a text (what and where), a hint (what to do), an exit code and an HTTP status.

SmoeError                 exit 1, 500   something failed
|-- UsageError            exit 2, 400   the request has no meaning
|   `-- UnsupportedError  exit 2, 400   it has one, but smoe does not do it
|-- ResourceError         exit 3, 507   not enough memory or disk for what was asked
|-- CorruptError          exit 4, 500   a file is damaged, cut short or of another make
`-- EngineError           exit 1, 503   the engine process died, or refused a request
    `-- EngineRefused     exit 1, 400   the engine answered <<ERR name>>
"""

from __future__ import annotations


class SmoeError(Exception):
    """Base of the tree. ``text`` says what and where, ``hint`` what to do about it. For programs that ask over HTTP,
    ``code`` is one word for the mistake and ``param`` the field of the request that holds it, where there are such."""

    exit_code = 1
    http_status = 500

    def __init__(self, text: str, hint: str = "", *, code: str = "", param: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.hint = hint
        self.code = code
        self.param = param


class UsageError(SmoeError):
    exit_code = 2
    http_status = 400


class UnsupportedError(UsageError):
    pass


class ResourceError(SmoeError):
    exit_code = 3
    http_status = 507


class CorruptError(SmoeError):
    exit_code = 4


class EngineError(SmoeError):
    http_status = 503


class EngineRefused(EngineError):
    """The engine answered ``<<ERR name>>``; ``name`` is the wire word, ``fields`` its key=value pairs."""

    http_status = 400

    def __init__(self, name: str, fields: dict[str, str] | None = None, text: str = "", hint: str = "") -> None:
        super().__init__(text or f"the engine refused the request: {name}", hint)
        self.name = name
        self.fields = fields or {}


_BY_CODE = {"usage": UsageError, "resources": ResourceError, "corrupt": CorruptError}


def from_core(error: Exception) -> SmoeError:
    """A ``_core.CoreError`` as a member of the tree."""
    kind = _BY_CODE.get(getattr(error, "code", ""), SmoeError)
    return kind(str(error), getattr(error, "hint", ""))
