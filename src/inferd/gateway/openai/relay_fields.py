"""The fields that are read of a request for a model with remote replicas alone. The remote server reads all others.

Knows wire formats. Does not know connections or how a request is served.
"""

from __future__ import annotations

from typing import Final

import msgspec

from inferd.config import Config

CHAT: Final = "/chat/completions"
TEXT: Final = "/completions"


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class _Message(msgspec.Struct, frozen=True):
    role: str
    content: msgspec.Raw = msgspec.Raw()


class Named(msgspec.Struct, frozen=True):
    """The model that a body names."""

    model: str | None = None


class RelayFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that chat and text completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | msgspec.UnsetType | None = msgspec.UNSET
    max_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    priority: int | None = None
    timeout: float | None = None

    @property
    def wants_usage(self) -> bool:
        options = self.stream_options
        return isinstance(options, _StreamOptions) and options.include_usage is True

    @property
    def has_own_fields(self) -> bool:
        """Whether the body has fields that only this server uses and that are removed for the remote server."""
        return self.priority is not None or self.timeout is not None


class ChatFields(RelayFields, frozen=True, kw_only=True):
    """The fields of a chat completion."""

    messages: list[_Message]
    max_completion_tokens: int | None = None

    @property
    def max_answer_tokens(self) -> int | None:
        """The larger of the two limits, because it is unknown which of them the remote server uses. None: none is
        set."""
        if self.max_completion_tokens is None:
            return self.max_tokens
        return max(self.max_completion_tokens, self.max_tokens or 0)


class TextFields(RelayFields, frozen=True, kw_only=True):
    """The fields of a text completion."""

    prompt: msgspec.Raw

    @property
    def max_answer_tokens(self) -> int | None:
        return self.max_tokens


class CachedFields(msgspec.Struct, frozen=True):
    """The fields that say whether an answer can be cached, and how it is streamed."""

    stream: bool | None = None
    stream_options: msgspec.Raw = msgspec.Raw()
    temperature: float | None = None
    seed: int | None = None
    timeout: float | None = None


cached_decoder: Final = msgspec.json.Decoder(CachedFields)
chat_decoder: Final = msgspec.json.Decoder(ChatFields)
named_decoder: Final = msgspec.json.Decoder(Named)
text_decoder: Final = msgspec.json.Decoder(TextFields)
_prompts: Final = msgspec.json.Decoder(list[msgspec.Raw])


def remote_models(config: Config) -> frozenset[str]:
    """Names of the models that have remote replicas alone."""
    return frozenset(name for name, model in config.models.items() if model.upstreams and not model.num_local)


def num_prompts_of(prompt: msgspec.Raw) -> int:
    """The number of prompts of a text completion. One prompt is a text, or a list of token ids."""
    given = bytes(prompt).lstrip()
    if not given.startswith(b"["):
        return 1
    prompts = _prompts.decode(given)
    is_tokens = not prompts or bytes(prompts[0]).lstrip()[:1] not in (b'"', b"[")
    return 1 if is_tokens else len(prompts)
