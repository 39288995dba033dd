"""Every refusal in OpenAI's error shape, and which HTTP status an exception of ours is."""

from __future__ import annotations

from typing import Any

from hf_cb.errors import (
    ManagerStoppedError,
    OptionError,
    PromptError,
    QueueFullError,
    RequestCancelledError,
    describe,
)

CLIENT_GONE = 499  # nginx's number; nobody reads it but the log


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: for a person.
        param: the field that is to blame, as it is written in the request.
        code: for a program, in OpenAI's words where they have one.
        retry_after: seconds after which another try makes sense.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after

    @property
    def kind(self) -> str:
        """OpenAI's `type`."""
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def bad(param: str, message: str, code: str | None = None) -> ApiError:
    """A field that is wrong, or that is not served; the message begins with its name."""
    return ApiError(400, f"{param} {message}", param, code)


def as_api_error(error: BaseException) -> ApiError:
    """What went wrong, as an answer. Anything that is not the client's doing is a 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, (OptionError, PromptError)):
        return ApiError(400, str(error))
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full")
    if isinstance(error, (ManagerStoppedError, RequestCancelledError)):
        return ApiError(503, str(error), code="unavailable")
    return ApiError(500, f"The request failed: {describe(error)}", code="internal_error")


def timed_out() -> ApiError:
    return ApiError(504, "The request ran out of its time before it was finished.", code="timeout")


def shutting_down() -> ApiError:
    return ApiError(503, "The server is shutting down.", code="shutting_down", retry_after=5)
