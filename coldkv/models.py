"""Loading a causal language model and its tokens from local files only."""

import hashlib
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coldkv.capture import INSTALL_HINT, import_transformers
from coldkv.errors import InputError, ToolError

_GGUF_MAGIC = b"GGUF"


@dataclass
class LoadedModel:
    """`name` without folders; `weights_sha256`: of the GGUF, or over names and digests of a folder's weight files."""

    name: str
    model: Any
    tokenizer: Any
    weights_sha256: str


def cache_dir() -> Path:
    """`$COLDKV_CACHE_DIR`, else `$XDG_CACHE_HOME/coldkv`, else `~/.cache/coldkv`."""
    if os.environ.get("COLDKV_CACHE_DIR"):
        return Path(os.environ["COLDKV_CACHE_DIR"])
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base) / "coldkv" if base else Path.home() / ".cache" / "coldkv"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _folder_sha256(folder: Path) -> str:
    weights = sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin") and p.is_file())
    if not weights:
        raise InputError(f"model {folder}: no .safetensors or .bin weights in the folder")
    return hashlib.sha256("".join(f"{_sha256(p)}  {p.name}\n" for p in weights).encode()).hexdigest()


def load_model(path: str | os.PathLike, *, message=None) -> LoadedModel:
    """Load a Hugging Face folder or a GGUF file; nothing is fetched from a network and no remote code runs.

    A GGUF's dequantized fp32 weights are kept under `cache_dir()`, because dequantizing takes minutes. `message`:
    called with one line before slow steps. InputError: not a model; ToolError: missing package, failed load.
    """
    path = Path(path)
    message = message or (lambda line: None)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"model {path}: expected config.json in the folder, found none")
        import_transformers()
        digest = _folder_sha256(path)
        model, tokenizer = _load(path, path)
        return LoadedModel(path.resolve().name, model, tokenizer, digest)
    if not path.is_file():
        raise InputError(f"model {path}: no such file or folder", hint="only local models are read")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != _GGUF_MAGIC:
        raise InputError(f"model {path}: expected a model folder or a GGUF file, found a file starting with {magic!r}")
    transformers = import_transformers()
    digest = _sha256(path)
    folder = cache_dir() / "models" / f"{digest[:32]}-transformers-{transformers.__version__}"
    if not (folder / "config.json").is_file():
        message(f"dequantizing {path.name} (kept in the cache for the next time)")
        model, tokenizer = _load(path, path.parent, gguf_file=path.name)
        _remember(model, tokenizer, folder, message)
    else:
        model, tokenizer = _load(path, folder)
    return LoadedModel(path.stem, model, tokenizer, digest)


def _load(path: Path, folder: Path, **options):
    import_transformers()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if sys.stderr is None or not sys.stderr.isatty():
        from transformers.utils import logging

        logging.disable_progress_bar()
    options["local_files_only"] = True
    weights = dict(options)
    if "gguf_file" in options:
        import transformers

        # Newer releases may keep a GGUF's blocks packed and compute on them; the cache wants plain weights.
        if hasattr(transformers, "GgufConfig"):
            weights["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), **options)
        dtype = "float32" if "gguf_file" in options else "auto"
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, low_cpu_mem_usage=True, **weights)
    except ImportError as error:
        raise ToolError(f"model {path}: a package is missing: {str(error).strip()[:200]}", hint=INSTALL_HINT) from None
    except (OSError, ValueError, KeyError, RuntimeError, NotImplementedError, AttributeError) as error:
        line = " ".join(str(error).split())[:300]
        raise ToolError(f"model {path}: transformers cannot load it: {type(error).__name__}: {line}") from None
    # A GGUF leaves the quantization it came from in the config; the weights are plain now, and saving refuses it.
    if "gguf_file" in options:
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        if getattr(model, "hf_quantizer", None) is not None:
            model.hf_quantizer = None
    return model.eval(), tokenizer


def _remember(model, tokenizer, folder: Path, message) -> None:
    """Save into a temporary folder and rename it, so that a broken save is never read back."""
    temporary = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.mkdtemp(prefix=".saving-", dir=folder.parent)
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        os.rename(temporary, folder)
    except OSError as error:
        if not (folder / "config.json").is_file():  # otherwise another process was faster
            message(f"weights not cached: {error.strerror or error}")
    finally:
        if temporary and os.path.isdir(temporary):
            shutil.rmtree(temporary, ignore_errors=True)


MAX_CHARACTERS_PER_TOKEN = 100


def encode_text(loaded: LoadedModel, text: str, *, tokens: int | None = None, where: str = "text"):
    """int64 `[1, n]`: the first `tokens` tokens of `text` (all of them if None), special tokens included.

    InputError: no tokens, or more than the model's context.
    """
    import torch

    ids = loaded.tokenizer(text, add_special_tokens=True)["input_ids"]
    if len(ids) * MAX_CHARACTERS_PER_TOKEN < len(
        text
    ):  # transformers makes up an empty tokenizer where files are missing
        raise InputError(
            f"{where}: {len(text)} characters gave {len(ids)} tokens; expected the tokenizer of {loaded.name}",
            hint="put its tokenizer files into the model's folder",
        )
    if tokens is not None:
        ids = ids[:tokens]
    context = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    if not ids:
        raise InputError(f"{where}: expected some text, found no tokens")
    if context and len(ids) > context:
        raise InputError(
            f"{where}: {len(ids)} tokens, but the context of {loaded.name} holds {context}",
            hint=f"use --tokens {context} or less",
        )
    return torch.tensor([ids], dtype=torch.int64)


def stderr_message(line: str) -> None:
    print(f"coldkv: {line}", file=sys.stderr, flush=True)
