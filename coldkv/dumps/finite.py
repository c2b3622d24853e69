"""NaN and Inf in a dump: found before they reach a codec, and named."""

import math

from coldkv.dumps.model import PlaneSource
from coldkv.errors import InputError

POLICIES = ("reject", "zero")


def check_finite(tensor, source: PlaneSource, start: int, policy: str = "reject"):
    """Return `tensor` (`[tokens, kv_heads, channels]`, read from `source` at token `start`) free of NaN and Inf.

    policy "reject": InputError naming file, tensor, token, head, channel and value of the first one; "zero": a copy
    with each replaced by 0. Integer tensors pass. Cost without any: one pass over the values.
    """
    import torch

    if policy not in POLICIES:
        raise InputError(f"nan policy: expected one of {', '.join(POLICIES)}, found {policy!r}")
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return tensor
    # One pass; NaN goes through both reductions. isfinite() itself is twenty times slower on 16-bit floats.
    low, high = torch.aminmax(tensor)
    if math.isfinite(low) and math.isfinite(high):
        return tensor
    bad = ~torch.isfinite(tensor)
    count = int(bad.sum())
    if policy == "zero":
        return torch.where(bad, torch.zeros((), dtype=tensor.dtype), tensor)
    flat = int(bad.reshape(-1).to(torch.uint8).argmax())
    value = float(tensor.reshape(-1)[flat])
    channels, heads = tensor.shape[2], tensor.shape[1]
    channel, head, token = flat % channels, flat // channels % heads, flat // (channels * heads)
    more = f" and {count - 1} more" if count > 1 else ""
    raise InputError(
        f"dump {source.path}: tensor {source.name}: expected finite values, found {value} "
        f"at token {start + token}, head {head}, channel {channel}{more}",
        hint="use --nan zero to read them as 0",
    )
