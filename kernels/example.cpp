// One head-page through the C interface, as an engine would call it: int8 plane -> slot -> values, and what that cost.
// With -DCKV_EXAMPLE_CUDA the same on a GPU, on a stream of its own. README.md says how to build it.
#include <cmath>
#include <cstdio>
#include <vector>

#include "coldkv.h"

#if defined(CKV_EXAMPLE_CUDA)
#include <cuda_runtime.h>

template <class T>
struct OnDevice {  // a copy of a vector in device memory
  T* data = nullptr;
  explicit OnDevice(const std::vector<T>& from) {
    cudaMalloc(&data, from.size() * sizeof(T));
    cudaMemcpy(data, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice);
  }
  ~OnDevice() { cudaFree(data); }
  void to(std::vector<T>* host, cudaStream_t stream) const {
    cudaMemcpyAsync(host->data(), data, host->size() * sizeof(T), cudaMemcpyDeviceToHost, stream);
  }
};
#endif

static int fail(const char* what, int code) {
  std::fprintf(stderr, "%s: %s\n", what, ckv_strerror(code));
  return 1;
}

int main() {
  const int tokens = 64, head_dim = 256;
  const ckv_plane_desc plane = {CKV_INT8, tokens, head_dim, 0, /*head-pages*/ 1};
  const int64_t slot_bytes = ckv_slot_bytes("e2m1_g16", plane.format, tokens, head_dim);
  if (slot_bytes < 0) return fail("slot size", static_cast<int>(-slot_bytes));

  std::vector<float> x(tokens * head_dim), back(x.size());  // values of the page: [tokens][head_dim]
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(0.37f * static_cast<float>(i)) * (1.0f + static_cast<float>(i % 7));
  std::vector<int8_t> codes(x.size());
  std::vector<uint16_t> scales(tokens * head_dim / 64);  // fp16, one for 64 channels
  std::vector<uint8_t> slot(static_cast<size_t>(slot_bytes));
  std::vector<int32_t> valid(1);

#if defined(CKV_EXAMPLE_CUDA)
  cudaStream_t stream;
  cudaStreamCreate(&stream);
  OnDevice<float> d_x(x), d_back(back);
  OnDevice<int8_t> d_codes(codes);
  OnDevice<uint16_t> d_scales(scales);
  OnDevice<uint8_t> d_slot(slot);
  OnDevice<int32_t> d_valid(valid);
  int code = ckv_quantize_cuda(&plane, d_x.data, d_codes.data, d_scales.data, stream);  // the hot tier
  if (code) return fail("quantize", code);
  code = ckv_e2m1_g16_encode_cuda(&plane, d_codes.data, d_scales.data, d_slot.data, slot_bytes, d_valid.data, stream);
  if (code) return fail("encode", code);
  code = ckv_e2m1_g16_decode_cuda(&plane, d_slot.data, slot_bytes, d_back.data, stream);
  if (code) return fail("decode", code);
  d_valid.to(&valid, stream);
  d_back.to(&back, stream);
  if (cudaStreamSynchronize(stream) != cudaSuccess) return fail("kernels", CKV_E_LAUNCH);  // they had only been launched
  cudaStreamDestroy(stream);
#else
  int code = ckv_quantize_cpu(&plane, x.data(), codes.data(), scales.data(), /*threads*/ 1);  // the hot tier
  if (code) return fail("quantize", code);
  code = ckv_e2m1_g16_encode_cpu(&plane, codes.data(), scales.data(), slot.data(), slot_bytes, valid.data(), 1);
  if (code) return fail("encode", code);
  code = ckv_e2m1_g16_decode_cpu(&plane, slot.data(), slot_bytes, back.data(), 1);
  if (code) return fail("decode", code);
#endif

  if (!valid[0]) return std::fprintf(stderr, "the page was refused: it stays hot\n"), 1;
  double error = 0, energy = 0;
  for (size_t i = 0; i < x.size(); ++i) error += std::pow(x[i] - back[i], 2), energy += std::pow(x[i], 2);
  std::printf("%zu bytes hot, %lld bytes cold, nmse %.4f\n", codes.size() + 2 * scales.size(), static_cast<long long>(slot_bytes), error / energy);
  return 0;
}
