"""What a codec is: bytes per slot, encode, decode and restore over batches of head-pages."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from coldkv.errors import InputError
from coldkv.geometry import Geometry

if TYPE_CHECKING:
    import numpy as np
    import torch

    from coldkv.tiers import HotPlane


class Codec(ABC):
    """Turns head-pages of a hot plane into fixed-size slots and back.

    Subclasses set the class variables and the four `*_torch`/`check` methods; `native` names the kernels
    (`ckv_<native>_encode_cpu` and so on) that must give the same bits, None if there are none.
    The byte format never changes under an id: a new format is a new id.
    """

    id: ClassVar[str]
    version: ClassVar[int]
    formats: ClassVar[tuple[str, ...]]  # hot plane formats that `encode` takes
    exact: ClassVar[bool] = False  # decode gives the hot plane's values bit for bit
    native: ClassVar[str | None] = None
    raw_slot: ClassVar[bool] = False  # the slot has the raw layout of kernels/FORMAT.md, which `inspect` can take apart
    inner: "Codec | None" = None  # a codec that does the work on a plane which this one changed (centered.py)
    head_bytes: ClassVar[int] = 8  # of a slot, that `odd_heads` looks at
    sized: ClassVar[bool] = False  # slot bytes are chosen per layer and plane from measured lengths (sized.py)

    @property
    def config(self) -> dict:
        """Options that differ from nothing: `get_codec(id, config)` gives an equal codec; JSON types only."""
        return {}

    @property
    def label(self) -> str:
        """The codec in results: its id, with its options if any (`id:key=value,...`), as `--codec` takes it."""
        import json

        options = ",".join(
            f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in self.config.items()
        )
        return f"{self.id}:{options}" if options else self.id

    @property
    def needs_stride(self) -> bool:
        """Whether slot bytes still have to be chosen: `lengths`, then `choose_stride` and `with_stride`, come first."""
        return False

    def bind(self, layer: int, plane: str, fmt: str, geometry: Geometry) -> "Codec":
        """The codec for one plane ("k" or "v", hot format `fmt`) of one layer of a model.

        Called before a plane's first page is looked at, and again when a pool is opened: `get_codec(id, config)` with
        the bound codec's config, bound again, must give an equal codec. Codecs that know something per layer or plane
        (calibration) return a copy; the others themselves.
        """
        return self

    def lengths_torch(self, plane: "HotPlane", geometry: Geometry) -> "torch.Tensor":
        """Sized codecs: int32 `[n]`, the slot bytes that each head-page needs; INT32_MAX where no size would do."""
        raise NotImplementedError(f"codec {self.id}: slots have one size, so there are no lengths")

    def choose_stride(
        self, lengths: "np.ndarray", geometry: Geometry, fmt: str, *, overflow_bytes: int | None = None
    ) -> int:
        """Sized codecs: slot bytes, a multiple of 16, for a plane whose head-pages need `lengths` (int32 `[n]`).

        `overflow_bytes` is what a head-page that does not fit costs: its own hot bytes (None), or in a pool, where a
        page is cold in all layers or in none, the hot bytes of the page in all of them.
        """
        raise NotImplementedError(f"codec {self.id}: slots have one size")

    def with_stride(self, stride: int) -> "Codec":
        """Sized codecs: a copy with slots of `stride` bytes. Its config has the stride, its label has it only if the
        user asked for that very size."""
        raise NotImplementedError(f"codec {self.id}: slots have one size")

    def native_params(self, geometry: Geometry, fmt: str, device) -> tuple:
        """Arguments of the kernels of this codec alone: tensors on `device` (passed as pointers) or ctypes values.

        They stand after the standard arguments and before threads or stream, in encode, decode, restore and lengths.
        """
        return ()

    def fits(self, fmt: str) -> bool:
        return fmt in self.formats

    def require_fit(self, fmt: str) -> None:
        if not self.fits(fmt):
            raise InputError(f"codec {self.id}: expected a plane of {', '.join(self.formats)}, found {fmt}")

    @abstractmethod
    def slot_bytes(self, geometry: Geometry, fmt: str) -> int:
        """Bytes of one head-page's slot, a multiple of 16. ToolError where `needs_stride`."""

    @abstractmethod
    def encode_torch(self, plane: "HotPlane", geometry: Geometry) -> "tuple[torch.Tensor, torch.Tensor]":
        """Hot plane of n head-pages -> (slots uint8 `[n, slot_bytes]`, valid int32 `[n]`).

        valid 0 means that the page cannot be held and stays hot; its slot is all zero.
        """

    @abstractmethod
    def decode_torch(self, slots: "torch.Tensor", geometry: Geometry, fmt: str) -> "torch.Tensor":
        """Slots uint8 `[n, slot_bytes]` -> fp32 `[n, page_tokens, head_dim]`: the values attention reads."""

    @abstractmethod
    def restored_format(self, fmt: str) -> str:
        """Hot format that holds the restored values of a page that was `fmt` exactly."""

    @abstractmethod
    def restore_torch(self, slots: "torch.Tensor", geometry: Geometry, fmt: str) -> "HotPlane":
        """Slots -> hot plane in `restored_format(fmt)` with the values of `decode_torch`."""

    @abstractmethod
    def check_slots(self, slots: "np.ndarray", geometry: Geometry, fmt: str) -> list[tuple[int, str]]:
        """Look at slots uint8 `[n, slot_bytes]` without decoding: (index, problem) of each slot to refuse."""

    def odd_heads(self, heads: "np.ndarray", geometry: Geometry, stride: int) -> bool:
        """Whether the first bytes of slots, uint8 `[n, head_bytes]`, call for `check_slots`: a quick look before device
        kernels read them, which cannot report. By default they are equal, with the codec's version and an odd flag."""
        version = int.from_bytes(heads[:1, 4:6].tobytes(), "little")
        return bool(len(heads)) and (version != self.version or not heads[0, 6] & 1 or bool((heads != heads[:1]).any()))

    def slot_fields(self, record: bytes, geometry: Geometry, fmt: str) -> list[tuple[int, int, str, str]] | None:
        """For `inspect`: (first byte, bytes, name, meaning) of the fields of one slot; None if nothing is known."""
        return None
