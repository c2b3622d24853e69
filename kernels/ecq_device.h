// Codec ecq on the device: entry points.
#pragma once

#include "ecq_decode_device.h"
#include "ecq_encode_device.h"

using namespace ckv;

extern "C" int ckv_ecq_encode_cuda(const ckv_plane_desc* d, const void* codes, const void* scales, uint8_t* slots, int64_t stride,
                                   int32_t* valid, const ckv_ecq_params* params, void* stream) {
  int rc = ecq::check_all(d, slots, stride, params);
  if (!rc) rc = check_plane(d, codes, scales);
  if (!rc) rc = ecq::check_count(d);
  if (rc || !d->n) return rc;
  if (!valid) return CKV_E_NULL;
  return ecq::launch_encode(*d, codes, scales, slots, stride, valid, nullptr, ecq::device_params(*params), stream);
}

extern "C" int ckv_ecq_lengths_cuda(const ckv_plane_desc* d, const void* codes, const void* scales, int32_t* lengths,
                                    const ckv_ecq_params* params, void* stream) {
  int rc = check_plane(d, codes, scales);
  if (!rc) rc = ecq::check_params(params);
  if (!rc) rc = ecq::check_count(d);
  if (rc || !d->n) return rc;
  if (!lengths) return CKV_E_NULL;
  return ecq::launch_encode(*d, codes, scales, nullptr, 0, nullptr, lengths, ecq::device_params(*params), stream);
}

extern "C" int ckv_ecq_decode_cuda(const ckv_plane_desc* d, const uint8_t* slots, int64_t stride, float* out, const ckv_ecq_params* params,
                                   void* stream) {
  int rc = ecq::check_all(d, slots, stride, params);
  if (!rc) rc = ecq::check_count(d);
  if (rc || !d->n) return rc;
  if (!out) return CKV_E_NULL;
  return ecq::launch_decode<ecq::FloatCells>(*d, slots, stride, out, ecq::device_params(*params), stream);
}

extern "C" int ckv_ecq_restore_cuda(const ckv_plane_desc* d, const uint8_t* slots, int64_t stride, void* codes, void*,
                                    const ckv_ecq_params* params, void* stream) {
  int rc = ecq::check_all(d, slots, stride, params);
  if (!rc) rc = ecq::check_count(d);
  if (rc || !d->n) return rc;
  if (!codes) return CKV_E_NULL;
  return ecq::launch_decode<ecq::Bf16Cells>(*d, slots, stride, codes, ecq::device_params(*params), stream);
}
