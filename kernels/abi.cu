// Entry points that belong to no codec: version, errors, slot sizes.
#include "slot.h"

namespace ckv {

CodecEntry*& codec_list() {
  static CodecEntry* head = nullptr;
  return head;
}

}  // namespace ckv

extern "C" int ckv_abi_version(void) { return 1; }

extern "C" const char* ckv_strerror(int code) {
  switch (code) {
    case CKV_OK: return "no error";
    case CKV_E_SHAPE: return "head_dim, page_tokens, heads or head-page count outside what the formats hold";
    case CKV_E_FORMAT: return "plane format unknown or not taken by this codec";
    case CKV_E_NULL: return "a pointer this plane format needs is NULL";
    case CKV_E_STRIDE: return "slot stride is smaller than the slot or not a multiple of 16";
    case CKV_E_SLOT: return "a slot is not valid: its header does not match, or its data does not decode";
    case CKV_E_LAUNCH: return "the device refused the kernel launch";
    case CKV_E_DTYPE: return "unknown dtype id";
    default: return "unknown error code";
  }
}

extern "C" int64_t ckv_slot_bytes(const char* codec_stem, int32_t format, int32_t page_tokens, int32_t head_dim) {
  if (!codec_stem) return -CKV_E_NULL;
  if (!ckv::shape_ok(0, page_tokens, head_dim)) return -CKV_E_SHAPE;
  if (!ckv::format_ok(format)) return -CKV_E_FORMAT;
  for (const ckv::CodecEntry* e = ckv::codec_list(); e; e = e->next)
    if (!strcmp(e->stem, codec_stem)) return e->accepts >> format & 1u ? e->slot_bytes(page_tokens, head_dim) : -CKV_E_FORMAT;
  return -CKV_E_FORMAT;
}
