// Host threads over independent head-pages. Work is split by index only, so results cannot depend on the thread count.
#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace ckv {

// Calls body(begin, end) on disjoint ranges that cover [0, n); `grain` items at least per thread.
template <class Body>
void parallel_for(int64_t n, int threads, int64_t grain, const Body& body) {
  if (n <= 0) return;
  int64_t want = threads > 0 ? threads : static_cast<int64_t>(std::thread::hardware_concurrency());
  want = std::max<int64_t>(1, std::min(want, n / std::max<int64_t>(1, grain)));
  if (want == 1) return body(int64_t{0}, n);
  std::vector<std::thread> team;
  team.reserve(static_cast<size_t>(want - 1));
  for (int64_t t = 1; t < want; ++t) team.emplace_back([&body, n, want, t] { body(n * t / want, n * (t + 1) / want); });
  body(int64_t{0}, n / want);
  for (auto& t : team) t.join();
}

// Head-pages per thread below which starting a thread costs more than it saves (about 64 KiB of values).
inline int64_t page_grain(int page_tokens, int head_dim) {
  return std::max<int64_t>(1, 65536 / (static_cast<int64_t>(page_tokens) * head_dim));
}

}  // namespace ckv
