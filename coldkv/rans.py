"""Range asymmetric numeral systems over 16 symbols, as torch code: the oracle of the entropy slots.

12-bit frequencies, a 32-bit state with lower bound 2^23, renormalised byte by byte. A stream is encoded from its last
symbol to its first; the bytes that leave the state come first, the final state is the last four bytes, little endian,
and a decoder reads all of it backwards. Integer arithmetic only (kernels/FORMAT.md, "rANS streams").
"""

import torch

SYMBOLS = 16
PROB_BITS = 12
TOTAL = 1 << PROB_BITS
LOW = 1 << 23  # the state stays in [LOW, 256 * LOW)
STATE_BYTES = 4


def frequencies(counts: torch.Tensor) -> torch.Tensor:
    """Symbol counts int64 `[m, 16]` -> frequencies int64 `[m, 16]`: at least 1 each, 4,096 in all.

    Floor of the share, at least 1; what is missing goes to the largest remainders, one each, what is too much comes
    off the largest frequency, one by one; of equals the smaller symbol. No counts at all: 256 each.
    """
    total = counts.sum(dim=1, keepdim=True)
    scaled = counts * TOTAL
    found = scaled // total.clamp(min=1)
    rest = torch.where(found > 0, scaled % total.clamp(min=1), -1)  # one lifted to 1 has had its share
    found = torch.where(total > 0, found.clamp(min=1), TOTAL // SYMBOLS)
    first = torch.arange(SYMBOLS - 1, -1, -1, device=counts.device)  # decides between equals
    for _ in range(SYMBOLS):
        missing = TOTAL - found.sum(dim=1, keepdim=True)
        give = (rest * SYMBOLS + first).argmax(dim=1, keepdim=True)
        take = (found * SYMBOLS + first).argmax(dim=1, keepdim=True)
        found.scatter_add_(1, give, (missing > 0).long())
        rest.scatter_(1, give, torch.where(missing > 0, -1, rest.gather(1, give)))
        found.scatter_add_(1, take, -(missing < 0).long())
    return found


def starts(freq: torch.Tensor) -> torch.Tensor:
    """First of the 4,096 places of each symbol, int64 `[m, 16]`."""
    return freq.cumsum(dim=1) - freq


def encode(symbols: torch.Tensor, count: torch.Tensor, freq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """m streams: symbols uint8 `[m, L]` of which the first `count` (int64 `[m]`) are coded -> (bytes uint8 `[m, W]`,
    length int64 `[m]`). A stream without symbols has no bytes; bytes past the length are unspecified."""
    m, most = symbols.shape
    start = starts(freq)
    state = torch.full((m,), LOW, dtype=torch.int64, device=symbols.device)
    # a symbol adds at most 12 bits and what rounding the state costs, far below one more
    out = torch.zeros((m, most * (PROB_BITS + 1) // 8 + 2 * STATE_BYTES), dtype=torch.uint8, device=symbols.device)
    at = torch.zeros((m, 1), dtype=torch.int64, device=symbols.device)
    for i in range(most - 1, -1, -1):
        active = i < count
        symbol = symbols[:, i : i + 1].long()
        f, b = freq.gather(1, symbol)[:, 0], start.gather(1, symbol)[:, 0]
        for _ in range(2):  # f = 1 sends out two bytes at most
            over = active & (state >= f << (23 - PROB_BITS + 8))
            out.scatter_(1, at, (state & 255).to(torch.uint8)[:, None])
            at += over[:, None]
            state = torch.where(over, state >> 8, state)
        state = torch.where(active, ((state // f) << PROB_BITS) + state % f + b, state)
    for i in range(STATE_BYTES):
        out.scatter_(1, at + i, (state >> 8 * i & 255).to(torch.uint8)[:, None])
    return out, torch.where(count > 0, at[:, 0] + STATE_BYTES, 0)


def decode(
    data: torch.Tensor, begin: torch.Tensor, end: torch.Tensor, count: torch.Tensor, freq: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """m streams in bytes `[begin, end)` (int64 `[m]`) of uint8 `data`, `count` symbols each -> (symbols uint8 `[m, L]`,
    ok bool `[m]`).

    ok: the state was in range, every byte was used, and the state came back to where encoding starts. Never reads
    outside `[begin, end)`; of a stream that is not ok the symbols are unspecified.
    """
    m, most = len(count), int(count.max()) if len(count) else 0
    start = starts(freq)
    symbols = torch.zeros((m, most), dtype=torch.uint8, device=data.device)
    used = count > 0
    ok = torch.where(used, end - begin >= STATE_BYTES, end == begin)
    data = torch.cat([data, data.new_zeros(1)])  # the last byte stands for reads that must not happen
    at = end.clone()
    state = torch.zeros_like(at)

    def read(at, wanted):
        inside = wanted & (at > begin)
        return data[torch.where(inside, at - 1, len(data) - 1)].long(), inside

    for _ in range(STATE_BYTES):
        byte, inside = read(at, used)
        state, at = state << 8 | byte, at - inside.long()
    ok &= ~used | ((state >= LOW) & (state < LOW << 8))
    state = torch.where(ok & used, state, LOW)
    for i in range(most):
        active = i < count
        place = state & TOTAL - 1
        symbol = (place[:, None] >= start).sum(dim=1, keepdim=True) - 1
        symbols[:, i] = symbol[:, 0]
        after = freq.gather(1, symbol)[:, 0] * (state >> PROB_BITS) + place - start.gather(1, symbol)[:, 0]
        state = torch.where(active, after, state)
        for _ in range(2):
            low = active & (state < LOW)
            byte, inside = read(at, low)
            ok &= ~low | inside
            state, at = torch.where(low, state << 8 | byte, state), at - inside.long()
    return symbols, ok & (~used | ((state == LOW) & (at == begin)))
