// Codec ecq: entropy-coded quantization. Entry points; the work is in ecq_host.h and ecq_device.h.
#include "ecq_core.h"

namespace ckv {
namespace ecq {

// Slot bytes below which no page fits: header, states, row bytes and no words.
inline int64_t least_slot(int T) { return (stream_at(T, true) + 15) / 16 * 16; }

constexpr int kMostCoarser = 255, kMostFill = 63, kMostNominal = 400;

inline int check_params(const ckv_ecq_params* p) {
  if (!p) return CKV_E_NULL;
  if (p->heads < 1 || p->heads > 256) return CKV_E_SHAPE;
  if (p->step < -kMostNominal || p->step > kMostNominal || p->fill < 0 || p->fill > kMostFill) return CKV_E_SHAPE;
  if (!(p->rounding >= 0.0f && p->rounding <= 0.5f)) return CKV_E_SHAPE;
  const bool all = p->mean && p->weight && p->gain && p->prior, none = !p->mean && !p->weight && !p->gain && !p->prior;
  return all || none ? CKV_OK : CKV_E_NULL;
}

inline int check_all(const ckv_plane_desc* d, const void* slots, int64_t stride, const ckv_ecq_params* p) {
  if (!d) return CKV_E_NULL;
  if (!format_ok(d->format)) return CKV_E_FORMAT;
  if (!shape_ok(d->n, d->page_tokens, d->head_dim)) return CKV_E_SHAPE;
  if (stride < least_slot(d->page_tokens) || stride % 16) return CKV_E_STRIDE;
  if (d->n && !slots) return CKV_E_NULL;
  return check_params(p);
}

inline uint8_t check_byte(const ckv_ecq_params& p) { return static_cast<uint8_t>(p.check); }

// Finds the step of one page: attempt(coarser) -> words needed. Returns the chosen `coarser`, which was attempted last, or
// kMostCoarser + 1 where not even the coarsest step fits. Finer steps by bisection, coarser ones one by one: FORMAT.md.
template <class Attempt>
CKV_HD int find_step(uint32_t room, int fill, const Attempt& attempt) {
  int coarser = 0, fits = 1, below = -fill - 1;  // fits <= 0 once step 0 has been found to fit
  for (;;) {
    if (attempt(coarser) <= room) {
      if (coarser > 0) return coarser;
      fits = coarser;
    } else if (coarser >= 0) {
      if (++coarser > kMostCoarser) return coarser;
      continue;
    } else {
      below = coarser;
    }
    if (fits - below <= 1) {
      if (coarser == fits) return fits;
      coarser = fits;
    } else {
      coarser = below + (fits - below) / 2;
    }
  }
}

CKV_HD uint32_t room_of(int64_t stride, int T, bool rows) {
  const int64_t words = (stride - stream_at(T, rows)) / 2;
  return words > kMaxWords ? kMaxWords : static_cast<uint32_t>(words);
}

constexpr int32_t kNever = 0x7FFFFFFF;

}  // namespace ecq
}  // namespace ckv

using namespace ckv;

static const RegisterCodec kRegister("ecq", ecq::kAccepts, slot_bytes_by_data);

#if CKV_BUILD_HOST
#include "codec_host.h"
#include "ecq_host.h"

namespace ckv {
namespace ecq {

// body(page, head, encoder) for every head-page, encoder loaded; refused(page) where the page cannot be coded.
template <class Body, class Refused>
void each_page(const ckv_plane_desc& d, const void* codes, const void* scales, const ckv_ecq_params& p, int threads, const Body& body,
               const Refused& refused) {
  const int T = d.page_tokens, D = d.head_dim;
  const std::vector<HeadParams> heads = head_params(p, D);
  parallel_for(d.n, threads, page_grain(T, D), [&](int64_t begin, int64_t end) {
    Workspace work;
    for (int64_t page = begin; page < end; ++page) {
      const int head = static_cast<int>(page % p.heads);
      PageEncoder encoder(p, heads[static_cast<size_t>(head)], T, D, work);
      bool good = false;
      with_format(d.format, [&](auto tag) {
        constexpr int F = decltype(tag)::value;
        good = encoder.load<F>(static_cast<const uint8_t*>(codes) + page * T * code_row_bytes(F, D),
                               static_cast<const uint8_t*>(scales) + page * T * scale_row_bytes(F, D));
      });
      if (good)
        body(page, head, encoder);
      else
        refused(page);
    }
  });
}

// use(page, header, head, work) for every page that decodes, its integers and row bytes in `work`; poison(page) for the others.
template <class Use, class Poison>
int decode_all(const ckv_plane_desc& d, const uint8_t* slots, int64_t stride, const ckv_ecq_params& p, int threads, const Use& use,
               const Poison& poison) {
  const int T = d.page_tokens, D = d.head_dim;
  const std::vector<HeadParams> heads = head_params(p, D);
  std::atomic<bool> bad{false};
  parallel_for(d.n, threads, page_grain(T, D), [&](int64_t begin, int64_t end) {
    Workspace work;
    for (int64_t page = begin; page < end; ++page) {
      const uint8_t* slot = slots + page * stride;
      const Header h = read_header(slot);
      if (header_ok(h, T, stride, p.heads, check_byte(p)) && read_page(slot, h, heads[h.head], T, D, work)) {
        use(page, h, heads[h.head], work);
      } else {
        poison(page);
        bad.store(true, std::memory_order_relaxed);
      }
    }
  });
  return bad.load() ? CKV_E_SLOT : CKV_OK;
}

// row(page, t, values) for every row of readable pages, bf16 as attention reads them; poison(page) for the others.
template <class Row, class Poison>
int read_rows(const ckv_plane_desc& d, const uint8_t* slots, int64_t stride, const ckv_ecq_params& p, int threads, const Row& row,
              const Poison& poison) {
  const auto rows_of = [&](int64_t page, const Header& h, const HeadParams& head, const Workspace& work) {
    uint16_t values[1024];
    for (int t = 0; t < d.page_tokens; ++t) {
      restore_row(work, h, head, t, d.head_dim, values);
      row(page, t, values);
    }
  };
  return decode_all(d, slots, stride, p, threads, rows_of, poison);
}

}  // namespace ecq
}  // namespace ckv

extern "C" int ckv_ecq_encode_cpu(const ckv_plane_desc* d, const void* codes, const void* scales, uint8_t* slots, int64_t stride,
                                  int32_t* valid, const ckv_ecq_params* params, int threads) {
  int rc = ecq::check_all(d, slots, stride, params);
  if (!rc) rc = check_plane(d, codes, scales);
  if (rc || !d->n) return rc;
  if (!valid) return CKV_E_NULL;
  const uint32_t room = ecq::room_of(stride, d->page_tokens, params->rows != 0);
  const auto refuse = [&](int64_t page) {
    memset(slots + page * stride, 0, static_cast<size_t>(stride));
    valid[page] = 0;
  };
  ecq::each_page(
      *d, codes, scales, *params, threads,
      [&](int64_t page, int head, ecq::PageEncoder& encoder) {
        const int coarser = ecq::find_step(room, params->fill, [&](int c) { return encoder.attempt(c); });
        if (coarser > ecq::kMostCoarser) return refuse(page);
        encoder.write(slots + page * stride, stride, head, coarser > 0);
        valid[page] = 1;
      },
      refuse);
  return CKV_OK;
}

extern "C" int ckv_ecq_lengths_cpu(const ckv_plane_desc* d, const void* codes, const void* scales, int32_t* lengths,
                                   const ckv_ecq_params* params, int threads) {
  int rc = check_plane(d, codes, scales);
  if (!rc) rc = ecq::check_params(params);
  if (rc || !d->n) return rc;
  if (!lengths) return CKV_E_NULL;
  const int at = ecq::stream_at(d->page_tokens, params->rows != 0);
  ecq::each_page(
      *d, codes, scales, *params, threads,
      [&](int64_t page, int, ecq::PageEncoder& encoder) {
        const int64_t words = encoder.attempt(0);
        lengths[page] = words > ecq::kMaxWords ? ecq::kNever : static_cast<int32_t>(at + 2 * words);
      },
      [&](int64_t page) { lengths[page] = ecq::kNever; });
  return CKV_OK;
}

extern "C" int ckv_ecq_decode_cpu(const ckv_plane_desc* d, const uint8_t* slots, int64_t stride, float* out, const ckv_ecq_params* params,
                                  int threads) {
  const int rc = ecq::check_all(d, slots, stride, params);
  if (rc || !d->n) return rc;
  if (!out) return CKV_E_NULL;
  const int64_t T = d->page_tokens, D = d->head_dim;
  return ecq::read_rows(
      *d, slots, stride, *params, threads,
      [&](int64_t page, int t, const uint16_t* values) {
        float* to = out + (page * T + t) * D;
        for (int c = 0; c < D; ++c) to[c] = bf16_to_float(values[c]);
      },
      [&](int64_t page) { poison_values(out + page * T * D, T * D); });
}

extern "C" int ckv_ecq_restore_cpu(const ckv_plane_desc* d, const uint8_t* slots, int64_t stride, void* codes, void*,
                                   const ckv_ecq_params* params, int threads) {
  const int rc = ecq::check_all(d, slots, stride, params);
  if (rc || !d->n) return rc;
  if (!codes) return CKV_E_NULL;
  const int64_t T = d->page_tokens, D = d->head_dim;
  uint16_t* plane = static_cast<uint16_t*>(codes);
  return ecq::read_rows(
      *d, slots, stride, *params, threads,
      [&](int64_t page, int t, const uint16_t* values) { memcpy(plane + (page * T + t) * D, values, 2 * static_cast<size_t>(D)); },
      [&](int64_t page) { std::fill(plane + page * T * D, plane + (page + 1) * T * D, uint16_t{0x7FC0}); });
}

extern "C" int ckv_ecq_integers_cpu(const ckv_plane_desc* d, const uint8_t* slots, int64_t stride, int16_t* k,
                                    const ckv_ecq_params* params, int threads) {
  const int rc = ecq::check_all(d, slots, stride, params);
  if (rc || !d->n) return rc;
  if (!k) return CKV_E_NULL;
  const int T = d->page_tokens, D = d->head_dim, padded = ceil_div(D, ecq::kLanes) * ecq::kLanes;
  return ecq::decode_all(
      *d, slots, stride, *params, threads,
      [&](int64_t page, const ecq::Header&, const ecq::HeadParams&, const ecq::Workspace& work) {
        int16_t* to = k + page * T * D;
        for (int t = 0; t < T; ++t) memcpy(to + t * D, work.k.data() + static_cast<size_t>(t) * padded, 2 * static_cast<size_t>(D));
      },
      [&](int64_t page) { std::fill(k + page * T * D, k + (page + 1) * T * D, int16_t{-32768}); });  // no integer of a slot
}

extern "C" int ckv_ecq_code_cpu(const ckv_plane_desc* d, const int16_t* k, uint8_t* slots, int64_t stride, int32_t* words, int threads) {
  ckv_ecq_params params{};
  params.heads = 1;
  const int rc = ecq::check_all(d, slots, stride, &params);
  if (rc || !d->n) return rc;
  if (!k || !words) return CKV_E_NULL;
  const int T = d->page_tokens, D = d->head_dim;
  const std::vector<ecq::HeadParams> heads = ecq::head_params(params, D);
  const uint32_t room = ecq::room_of(stride, T, false);
  parallel_for(d->n, threads, page_grain(T, D), [&](int64_t begin, int64_t end) {
    ecq::Workspace work;
    for (int64_t page = begin; page < end; ++page) {
      ecq::PageEncoder encoder(params, heads[0], T, D, work);
      const uint32_t need = encoder.code_integers(k + page * T * D);
      words[page] = static_cast<int32_t>(need);
      if (need <= room)
        encoder.write(slots + page * stride, stride, 0, false);
      else
        memset(slots + page * stride, 0, static_cast<size_t>(stride));
    }
  });
  return CKV_OK;
}
#endif  // CKV_BUILD_HOST

#if CKV_BUILD_DEVICE
#include "ecq_device.h"
#endif
