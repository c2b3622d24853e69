// Error statistics of a restored plane: fp64 sums whose order depends on the shape alone.
#include "plane.h"
#if CKV_BUILD_HOST
#include <cmath>
#include <vector>

#include "parallel.h"
#else
#include "stats_device.h"
#endif

#if CKV_BUILD_HOST
namespace ckv {
namespace stats {

constexpr int kLanes = 8;

struct Sums {
  double xx, yy, xy, dd, most;
};

// One head-page: eight interleaved partial sums per quantity, then a fixed tree. Compilers vectorize the lane loops; the order
// of the additions is the written one either way.
inline Sums page_sums(const float* x, const float* y, int64_t count) {
  double xx[kLanes] = {}, yy[kLanes] = {}, xy[kLanes] = {}, dd[kLanes] = {}, most[kLanes] = {};
  int64_t i = 0;
  const auto add = [&](int lane, float xf, float yf) {
    const double a = static_cast<double>(xf), b = static_cast<double>(yf), e = a - b;
    xx[lane] += a * a;
    yy[lane] += b * b;
    xy[lane] += a * b;
    dd[lane] += e * e;
    const double m = std::fabs(e);
    most[lane] = most[lane] >= m ? most[lane] : m;
  };
#if CKV_AVX2
  __m256d v[5][2] = {};
  const __m256d magnitude = _mm256_castsi256_pd(_mm256_set1_epi64x(INT64_MAX));
  for (; i + kLanes <= count; i += kLanes)
    for (int half = 0; half < 2; ++half) {
      const __m256d a = _mm256_cvtps_pd(_mm_loadu_ps(x + i + 4 * half)), b = _mm256_cvtps_pd(_mm_loadu_ps(y + i + 4 * half));
      const __m256d e = _mm256_sub_pd(a, b), m = _mm256_and_pd(e, magnitude);
      v[0][half] = _mm256_add_pd(v[0][half], _mm256_mul_pd(a, a));
      v[1][half] = _mm256_add_pd(v[1][half], _mm256_mul_pd(b, b));
      v[2][half] = _mm256_add_pd(v[2][half], _mm256_mul_pd(a, b));
      v[3][half] = _mm256_add_pd(v[3][half], _mm256_mul_pd(e, e));
      v[4][half] = _mm256_blendv_pd(m, v[4][half], _mm256_cmp_pd(v[4][half], m, _CMP_GE_OQ));
    }
  for (int half = 0; half < 2; ++half) {
    _mm256_storeu_pd(xx + 4 * half, v[0][half]);
    _mm256_storeu_pd(yy + 4 * half, v[1][half]);
    _mm256_storeu_pd(xy + 4 * half, v[2][half]);
    _mm256_storeu_pd(dd + 4 * half, v[3][half]);
    _mm256_storeu_pd(most + 4 * half, v[4][half]);
  }
#else
  for (; i + kLanes <= count; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) add(lane, x[i + lane], y[i + lane]);
#endif
  for (int lane = 0; i < count; ++i, ++lane) add(lane, x[i], y[i]);
  const auto tree = [](const double* s) { return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7])); };
  double top = most[0];
  for (int lane = 1; lane < kLanes; ++lane) top = top >= most[lane] ? top : most[lane];
  return {tree(xx), tree(yy), tree(xy), tree(dd), top};
}

}  // namespace stats
}  // namespace ckv

using namespace ckv;

extern "C" int ckv_stats_cpu(int64_t n, int32_t heads, int32_t rows, int32_t head_dim, const float* x, const float* y, double* out,
                             double* channel_sums, int threads) {
  if (heads < 1 || !shape_ok(n, rows, head_dim) || n % heads) return CKV_E_SHAPE;
  if (!out || (n && (!x || !y))) return CKV_E_NULL;
  const int64_t count = static_cast<int64_t>(rows) * head_dim;
  std::vector<stats::Sums> sums(static_cast<size_t>(n));
  // Channel sums per head-page first, added over pages in page order below.
  std::vector<double> channels(channel_sums ? static_cast<size_t>(n * head_dim) : 0);
  parallel_for(n, threads, page_grain(rows, head_dim), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      sums[static_cast<size_t>(i)] = stats::page_sums(x + i * count, y + i * count, count);
      if (channel_sums) {
        double* c = channels.data() + i * head_dim;
        for (int row = 0; row < rows; ++row)
          for (int ch = 0; ch < head_dim; ++ch) c[ch] += static_cast<double>(x[i * count + static_cast<int64_t>(row) * head_dim + ch]);
      }
    }
  });
  for (int64_t i = 0; i < n; ++i) {
    double* o = out + 6 * (i % heads);
    const stats::Sums& s = sums[static_cast<size_t>(i)];
    o[0] += s.xx;
    o[1] += s.yy;
    o[2] += s.xy;
    o[3] += s.dd;
    o[4] = o[4] >= s.most ? o[4] : s.most;
    o[5] += static_cast<double>(count);
    if (channel_sums)
      for (int ch = 0; ch < head_dim; ++ch) channel_sums[(i % heads) * head_dim + ch] += channels[static_cast<size_t>(i * head_dim + ch)];
  }
  return CKV_OK;
}
#endif  // CKV_BUILD_HOST

#if CKV_BUILD_DEVICE
using namespace ckv;

extern "C" int ckv_stats_cuda(int64_t n, int32_t heads, int32_t rows, int32_t head_dim, const float* x, const float* y, double* out,
                              double* channel_sums, void* stream) {
  if (heads < 1 || !shape_ok(n, rows, head_dim) || n % heads) return CKV_E_SHAPE;
  if (!out || (n && (!x || !y))) return CKV_E_NULL;
  if (!n) return CKV_OK;
  if (check_aligned(x, y, nullptr) || check_aligned(out, channel_sums, nullptr)) return CKV_E_ALIGN;
  const int64_t pages = n / heads, chunks = pages < stats::kMaxChunks ? pages : stats::kMaxChunks, places = heads * chunks;
  const int64_t figures = places * stats::kFigures, channels = channel_sums ? places * head_dim : 0;
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  void* allocated = nullptr;  // stream-ordered: allocating and freeing it synchronises nothing
  if (cudaMallocAsync(&allocated, sizeof(double) * static_cast<size_t>(figures + channels), on) != cudaSuccess) return CKV_E_LAUNCH;
  double *partial = static_cast<double*>(allocated), *channel_partial = channel_sums ? partial + figures : nullptr;
  const dim3 grid(static_cast<unsigned>(heads), static_cast<unsigned>(chunks));
  const int count = static_cast<int>(chunks);
  if (head_dim % 4 == 0)
    CKV_LAUNCH((stats::sums_kernel<4>), grid, kBlock, stream, pages, heads, rows, head_dim, x, y, partial, channel_partial);
  else
    CKV_LAUNCH((stats::sums_kernel<2>), grid, kBlock, stream, pages, heads, rows, head_dim, x, y, partial, channel_partial);
  const double elements = static_cast<double>(pages) * rows * head_dim;
  CKV_LAUNCH(stats::finish_kernel, grid_for(heads), kBlock, stream, heads, count, elements, partial, out);
  if (channel_sums)
    CKV_LAUNCH(stats::finish_channels_kernel, grid_for(static_cast<int64_t>(heads) * head_dim), kBlock, stream, heads, count, head_dim,
               channel_partial, channel_sums);
  const int rc = launch_status();
  cudaFreeAsync(allocated, on);
  return rc;
}
#endif  // CKV_BUILD_DEVICE
