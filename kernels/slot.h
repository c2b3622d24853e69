// Byte layout of the raw slots (FORMAT.md is the specification) and the plane layout arithmetic shared by all codecs.
#pragma once

#include "coldkv.h"
#include "port.cuh"

namespace ckv {

constexpr uint32_t kSlotMagic = 0x49384352u;  // bytes "RC8I" in a little-endian dump
constexpr uint16_t kFlagValid = 1u;
constexpr uint16_t kFlagIso3 = 2u;  // version 3 only

struct SlotHeader {
  uint32_t magic;
  uint16_t version;
  uint16_t flags;
  float page_scale;   // version 2; zero bytes in versions 1 and 3
  uint32_t reserved;  // zero
};
static_assert(sizeof(SlotHeader) == 16, "slot header is 16 bytes");
static_assert(offsetof(SlotHeader, version) == 4 && offsetof(SlotHeader, flags) == 6, "slot header fields");
static_assert(offsetof(SlotHeader, page_scale) == 8, "page scale sits in the seed's reserved bytes");

CKV_HD int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Offsets of one slot for a page of T rows of D channels.
struct SlotShape {
  int T, D, g16;        // rows, channels, 16-channel groups per row (the last may be shorter)
  int64_t scales_at;    // first scale byte
  int64_t payload_end;  // first padding byte
  int64_t bytes;        // multiple of 16

  CKV_HD SlotShape(int page_tokens, int head_dim) : T(page_tokens), D(head_dim), g16(ceil_div(head_dim, 16)) {
    scales_at = static_cast<int64_t>(sizeof(SlotHeader)) + static_cast<int64_t>(T) * D / 2;
    payload_end = scales_at + static_cast<int64_t>(T) * g16;
    bytes = (payload_end + 15) / 16 * 16;
  }
};

inline bool shape_ok(int64_t n, int page_tokens, int head_dim) {
  return n >= 0 && page_tokens >= 1 && page_tokens <= 4096 && head_dim >= 2 && head_dim <= 1024 && head_dim % 2 == 0;
}

inline bool format_ok(int format) { return format >= CKV_BF16 && format <= CKV_ISO3; }

CKV_HD bool has_nibbles(int format) { return format == CKV_NVFP4 || format == CKV_ISO3; }

// Bytes of one row of codes and of scales in a hot plane.
CKV_HD int64_t code_row_bytes(int format, int D) {
  return format <= CKV_FP16 ? 2 * D : has_nibbles(format) ? D / 2 : D;
}
CKV_HD int64_t scale_row_bytes(int format, int D) {
  if (format == CKV_INT8) return 2 * ceil_div(D, 64);
  if (format == CKV_FP8) return 2;
  return has_nibbles(format) ? ceil_div(D, 16) : 0;
}

// Zero, NaN or a set sign bit is not a scale of the nvfp4 and iso3 tiers; a page with one is refused.
CKV_HD bool not_a_scale(uint8_t byte) { return byte == 0 || byte >= 0x7Fu; }

CKV_HD bool header_ok(const uint8_t* slot, uint16_t version, uint16_t flags) {
  SlotHeader h;
  memcpy(&h, slot, sizeof h);
  return h.magic == kSlotMagic && h.version == version && h.flags == flags;
}

CKV_HD void write_header(uint8_t* slot, uint16_t version, uint16_t flags, uint32_t page_scale_bits) {
  SlotHeader h;
  h.magic = kSlotMagic;
  h.version = version;
  h.flags = flags;
  h.page_scale = float_of(page_scale_bits);
  h.reserved = 0;
  memcpy(slot, &h, sizeof h);
}

// Checks shared by every codec entry point. `accepts` is a bit set of plane formats.
inline int check_call(const ckv_plane_desc* d, unsigned accepts, const void* slots, int64_t stride) {
  if (!d) return CKV_E_NULL;
  if (!format_ok(d->format) || !(accepts >> d->format & 1u)) return CKV_E_FORMAT;
  if (!shape_ok(d->n, d->page_tokens, d->head_dim)) return CKV_E_SHAPE;
  if (stride < SlotShape(d->page_tokens, d->head_dim).bytes || stride % 16) return CKV_E_STRIDE;
  if (d->n && !slots) return CKV_E_NULL;
  return CKV_OK;
}

inline int check_plane(const ckv_plane_desc* d, const void* codes, const void* scales) {
  if (!d) return CKV_E_NULL;
  if (!format_ok(d->format)) return CKV_E_FORMAT;
  if (!shape_ok(d->n, d->page_tokens, d->head_dim)) return CKV_E_SHAPE;
  if (d->n && (!codes || (scale_row_bytes(d->format, d->head_dim) && !scales))) return CKV_E_NULL;
  return CKV_OK;
}

// A codec announces itself to ckv_slot_bytes from its own file, so that no list of codecs is kept by hand.
struct CodecEntry {
  const char* stem;
  unsigned accepts;
  int64_t (*slot_bytes)(int page_tokens, int head_dim);
  CodecEntry* next;
};
CodecEntry*& codec_list();
struct RegisterCodec {
  CodecEntry entry;
  RegisterCodec(const char* stem, unsigned accepts, int64_t (*slot_bytes)(int, int)) : entry{stem, accepts, slot_bytes, codec_list()} {
    codec_list() = &entry;
  }
};

// Where the size follows from the data, there is none to give for a shape.
inline int64_t slot_bytes_by_data(int, int) { return -CKV_E_STRIDE; }
inline int64_t raw_slot_bytes(int page_tokens, int head_dim) { return SlotShape(page_tokens, head_dim).bytes; }

}  // namespace ckv
