"""The files of a model directory: its weights as a torch module, and the token ids that end a turn.

What is wrong with the directory is the operator's to mend: a `UsageError` of one line. Weights are safetensors only, code in the directory is never
run, and nothing is downloaded. torch is imported inside `load_model`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gyre.config import Model
from gyre.errors import UsageError
from gyre.weights.snapshot import model_tensors

if TYPE_CHECKING:
    import torch

_KEY = "model.path"
_REMEDY = "give the directory of a Hugging Face causal language model (config.json, *.safetensors, tokenizer.json)"


def model_dir(path: str) -> Path:
    """The directory at `model.path`. Raises `UsageError` when it holds no model."""
    if not path:
        raise UsageError("run.toml", "not set", _REMEDY, _KEY)
    directory = Path(path)
    if not directory.is_dir():
        raise UsageError("run.toml", f"{path} is not a directory", _REMEDY, _KEY)
    if not (directory / "config.json").is_file():
        raise UsageError("run.toml", f"{path} has no config.json", _REMEDY, _KEY)
    return directory


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise UsageError(str(file), f"cannot be read as JSON ({e})", _REMEDY) from None
    return data if isinstance(data, dict) else {}


def eos_ids(directory: Path) -> frozenset[int]:
    """Ids that end a turn: those of generation_config.json and config.json, and the tokenizer's eos_token."""
    ids: set[int] = set()
    for file in ("generation_config.json", "config.json"):
        value = _json(directory / file).get("eos_token_id")
        ids.update([value] if isinstance(value, int) else value or [])
    token = _json(directory / "tokenizer_config.json").get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    if content:
        added = _json(directory / "tokenizer.json").get("added_tokens") or []
        ids.update(t["id"] for t in added if t.get("content") == content)
    return frozenset(ids)


def position_limit(directory: Path) -> int | None:
    """Positions the model knows, if its configuration says."""
    limit = _json(directory / "config.json").get("max_position_embeddings")
    return limit if isinstance(limit, int) else None


def model_shapes(directory: Path) -> dict[str, list[int]]:
    """Names and shapes of the tensors that a publication of this model has, without its weights. Raises `UsageError`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory, local_files_only=True))  # type: ignore[no-untyped-call]
    except (OSError, ValueError, KeyError) as e:
        raise unloadable(str(directory), e) from None
    return {name: list(tensor.shape) for name, tensor in model_tensors(model).items()}


def unloadable(path: str, error: Exception) -> UsageError:
    """What transformers, or vLLM, says of a directory that it cannot read, in one line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return UsageError("run.toml", f"{path} cannot be loaded ({lines[0].rstrip('.')})", _REMEDY, _KEY)


def device_of(name: str) -> str:
    """`model.device` with auto decided."""
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("run.toml", "cuda is asked for and torch sees no GPU", "set it to auto or cpu", "model.device")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def load_model(table: Model) -> torch.nn.Module:
    """The causal language model at `model.path`, for inference. Raises `UsageError`."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    directory = model_dir(table.path)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=getattr(torch, table.dtype), local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as e:  # whatever transformers says of a directory it cannot read
        raise unloadable(table.path, e) from None
    model, info = loaded
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise UsageError("run.toml", f"{table.path} lacks the weights {missing[0]} (and {len(missing) - 1} others)", _REMEDY, _KEY)
    refuse_unsupported(model, table.path)
    on_device: torch.nn.Module = model.eval().requires_grad_(False).to(device_of(table.device))
    return on_device


def refuse_unsupported(model: Any, path: str) -> None:
    """Refuse models whose layers see anything but all earlier tokens. Raises `UsageError`."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if getattr(config, "attn_logit_softcapping", None):
        kinds.add("capped attention logits")
    if getattr(config, "sliding_window", None) and not getattr(config, "layer_types", None):
        kinds.add("sliding_attention")
    if kinds:
        raise UsageError("run.toml", f"{path} has layers the torch engine does not know ({', '.join(sorted(kinds))})", _REMEDY, _KEY)
