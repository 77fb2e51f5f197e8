"""A model's chat template and tokenizer, loaded from its directory without the library that wrote them.

Invariants
- A template renders to the same text as with transformers: the same sandboxed Jinja environment (trim_blocks, lstrip_blocks, loop controls), the same
  `tojson`, `raise_exception`, `strftime_now`, `generation` blocks, and the special tokens of tokenizer_config.json as variables.
- Ids are those of tokenizer.json for that text, nothing added (templates write the special tokens themselves).
- Only the template writes control tokens. One that stands in a message, a tool or an argument is tokenised as the characters it is spelled with, if
  `guard` was shown the text: what an agent reads in a file cannot end its turn.
- Several threads may render and encode at once. A long text is tokenised without the interpreter's lock: others go on meanwhile.
- `strftime_now` tells the moment at which the template was loaded: a date that changes would be another history.
- What a directory lacks is a `UsageError` that names file, key and remedy.

What to render, and what to splice instead, is decided in `render`.
"""

from __future__ import annotations

import json
import os
import re
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from threading import Lock
from typing import Any, Final

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from gyre.errors import UsageError
from gyre.sandbox.gateway.resume import FILTERS, TRACE, Indexed, Mark, Trace, weave

_CACHED_TEXTS: Final = 512
_CACHED_CHARS: Final = 16_384  # longer texts are not worth their memory in the cache
_CUT: Final = "\ufdd0"  # a code point that is no character: the text is tokenised apart on both sides of it
_encoder: Final = json.JSONEncoder(ensure_ascii=False)
_CONTROL: Final = re.compile(r"<[|｜].*[|｜]>", re.S)  # some tokenizers forget to declare these special


class TemplateRefused(ValueError):
    """The chat template rejects these messages (it called raise_exception, or needs a key they lack)."""


class TooLong(Exception):
    """A text has more tokens than may be. `n_tokens`: at least so many."""

    def __init__(self, n_tokens: int) -> None:
        super().__init__(f"at least {n_tokens} tokens")
        self.n_tokens = n_tokens


class _Generation(Extension):
    """`{% generation %}` marks assistant tokens for other tools; for us its body is just text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    @staticmethod
    def _body(caller: Any) -> str:
        return str(caller())


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(x: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    if not (ensure_ascii or indent or separators or sort_keys):
        return _encoder.encode(x)
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a short cut for `message.role`: what no dictionary has as an attribute can only be a key."""

    _attributes = frozenset(dir(dict))

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in self._attributes:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(obj) is Indexed:
            obj.note(argument)
        return super().getitem(obj, argument)


def compile_template(source: str) -> jinja2.Template:
    """Compile a chat template. Raises `jinja2.TemplateSyntaxError`."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters |= {"tojson": _tojson, **FILTERS}
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = datetime.now().strftime
    return environment.from_string(weave(environment.parse(source)))


class ChatTemplate:
    """Messages to text, text to ids, ids to text."""

    def __init__(self, tokenizer: Tokenizer, source: str, variables: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer
        self._template = compile_template(source)
        self._variables = dict(variables)
        self._ids: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = Lock()  # of these
        self._longest = max(map(len, tokenizer.get_vocab()), default=1)
        self._control = _control(tokenizer)

    @classmethod
    def load(cls, directory: Path) -> ChatTemplate:
        """Load tokenizer.json, tokenizer_config.json and the chat template of a Hugging Face model directory. Raises `UsageError`."""
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise UsageError(str(file), "no such file", "give model.path a Hugging Face model directory with a fast tokenizer")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # threads of its own would be lost in a fork
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as e:  # the library raises bare Exception
            raise UsageError(str(file), f"not a tokenizer ({e})", "save the tokenizer again as tokenizer.json") from None
        tokenizer.no_padding()
        tokenizer.no_truncation()
        config = _read_json(directory / "tokenizer_config.json")
        source = _template_source(directory, config)
        variables = {k: _token_text(v) for k, v in config.items() if k.endswith("_token") and _token_text(v) is not None}
        try:
            return cls(tokenizer, source, variables)
        except jinja2.TemplateSyntaxError as e:
            raise UsageError(str(directory), f"the chat template does not parse ({e})", "mend it", "chat_template") from None

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any, *, reply_follows: bool, marks: dict[int, Mark] | None = None) -> str:
        """The template's text; `reply_follows` adds the opening of the assistant's turn. `marks`, if given, are those of a rendering of messages that
        these may begin with, and become those of this one. Raises `TemplateRefused`."""
        trace = Trace({} if marks is None else marks)
        given = {"messages": Indexed(messages), "tools": tools, "documents": None, "add_generation_prompt": reply_follows, TRACE: trace}
        try:
            for piece in self._template.root_render_func(self._template.new_context(self._variables | given)):
                trace.out.append(piece)
            return "".join(trace.out)
        except (jinja2.exceptions.TemplateError, TypeError, KeyError, AttributeError, ValueError, IndexError) as e:
            raise TemplateRefused(f"the model's chat template rejects these messages: {e}") from None

    def has_control(self, text: str) -> bool:
        """Whether a control token is spelled in a text."""
        return self._control is not None and self._control.search(text) is not None

    def guard(self, value: Any) -> Any:
        """A JSON value whose strings are rendered as what they are: control tokens in them are cut in two. Shares what needs no cut."""
        if isinstance(value, str):
            if self._control is None or not self.has_control(value):
                return value
            return self._control.sub(lambda m: m[0][:1] + _CUT + m[0][1:], value)
        if isinstance(value, dict):
            pairs = [(self.guard(k), self.guard(v)) for k, v in value.items()]
            changed = any(k is not a or v is not b for (k, v), (a, b) in zip(pairs, value.items(), strict=True))
            return dict(pairs) if changed else value
        if isinstance(value, list):
            items = [self.guard(v) for v in value]
            return items if any(a is not b for a, b in zip(items, value, strict=True)) else value
        return value

    def encode(self, text: str, at_most: int) -> array[int]:
        """Ids of a text, special tokens recognised, but none across a cut. The result is shared: do not change it.

        Raises `TooLong`, at once, if that must be more than `at_most`: no token spells more than the longest of the vocabulary.
        """
        if (least := len(text) // self._longest) > at_most:
            raise TooLong(least)
        if len(text) > _CACHED_CHARS:
            return self._encode(text)
        with self._lock:
            ids = self._ids.pop(text, None) or self._encode(text)
            self._ids[text] = ids
            if len(self._ids) > _CACHED_TEXTS:
                self._ids.popitem(last=False)
        return ids

    def _encode(self, text: str) -> array[int]:
        """By the call that lets go of the interpreter's lock and makes nothing but ids; a single `encode` does neither."""
        ids = array("i")
        for piece in text.split(_CUT) if _CUT in text else (text,):
            (encoding,) = self.tokenizer.encode_batch_fast([piece], add_special_tokens=False)
            ids.extend(encoding.ids)
        return ids

    def is_control(self, token_id: int) -> bool:
        """Whether a token is one of those that only templates and the policy write."""
        text = self.tokenizer.id_to_token(token_id)
        return self._control is not None and text is not None and self._control.fullmatch(text) is not None

    def decode(self, ids: array[int]) -> str:
        """Text of ids, special tokens as they are written."""
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=False))


def _control(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Matches any control token: those declared special, and those that look it. Marks such as `<think>` and `<tool_call>` are none."""
    added = tokenizer.get_added_tokens_decoder().values()
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    texts = [t.content for t in added if len(t.content) > 1 and t.content not in marks and (t.special or _CONTROL.fullmatch(t.content))]
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True)))) if texts else None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise UsageError(str(file), f"cannot be read ({e})", "save the tokenizer again") from None
    if not isinstance(value, dict):
        raise UsageError(str(file), "not a JSON object", "save the tokenizer again")
    return value


def _template_source(directory: Path, config: Mapping[str, Any]) -> str:
    """chat_template.jinja wins over the key; several named templates: the one called default."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
        source = named.get("default")
    if not isinstance(source, str) or not source:
        remedy = "add one, or a chat_template.jinja beside it: conversations cannot be rendered without"
        raise UsageError(str(directory / "tokenizer_config.json"), "the tokenizer has no chat template", remedy, "chat_template")
    return source


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
