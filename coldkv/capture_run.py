"""What `coldkv capture` does: read the text, load the model, record, write."""

import hashlib
import os
from pathlib import Path

from coldkv._version import __version__
from coldkv.atomic import check_output
from coldkv.capture import record, write_recording
from coldkv.errors import InputError
from coldkv.models import encode_text, load_model, stderr_message


def read_text(path: str | os.PathLike) -> tuple[str, str]:
    """(text, sha256 of the file's bytes); InputError if missing, empty or not UTF-8."""
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"text {path}: cannot be read: {error.strerror}") from None
    if not raw:
        raise InputError(f"text {path}: the file is empty")
    try:
        return raw.decode("utf-8"), hashlib.sha256(raw).hexdigest()
    except UnicodeDecodeError as error:
        raise InputError(f"text {path}: expected UTF-8, found byte {raw[error.start]:#04x} at {error.start}") from None


def run_capture(
    model_path: str | os.PathLike,
    text_path: str | os.PathLike,
    output: str | os.PathLike,
    *,
    tokens: int | None = None,
    samples: int = 64,
    layers: list[int] | None = None,
    dtype: str = "bf16",
    page_tokens: int = 64,
    provenance: dict | None = None,
    message=stderr_message,
) -> None:
    """Capture `model_path` on `text_path` into the dump `output`. Errors as `load_model`, `encode_text`, `record`."""
    # Loading takes minutes: what can be refused is refused before.
    if os.path.splitext(os.fspath(output))[1].lower() != ".safetensors":
        raise InputError(f"output {output}: expected a name ending in .safetensors")
    check_output(output, text_path, model_path)
    text, text_sha256 = read_text(text_path)
    loaded = load_model(model_path, message=message)
    input_ids = encode_text(loaded, text, tokens=tokens, where=f"text {text_path}")
    message(f"running {loaded.name} over {input_ids.shape[1]} tokens")
    recording = record(loaded.model, input_ids, samples=samples, layers=layers, dtype=dtype)
    meta = {
        "model": loaded.name,
        "page_tokens": page_tokens,
        "text_sha256": text_sha256,
        "provenance": {
            "tool": f"coldkv {__version__}",
            "command": "capture",
            "model_type": loaded.model.config.get_text_config().model_type,
            "weights_sha256": loaded.weights_sha256,
            "compute_dtype": str(loaded.model.dtype).removeprefix("torch."),
            "text": Path(text_path).name,
            "tokens": recording.tokens,
            **(provenance or {}),
        },
    }
    write_recording(output, recording, dtype=dtype, meta=meta)
    kinds = [layer.kind for layer in recording.layers]
    parts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("full", "sliding", "mla") if kind in kinds)
    size = os.path.getsize(output) / 1e6
    message(f"wrote {output}: {len(kinds)} layers ({parts}), {recording.tokens} tokens, {size:.1f} MB")
