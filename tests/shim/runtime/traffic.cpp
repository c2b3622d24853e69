#include "traffic.h"

#include <unordered_map>
#include <unordered_set>

#include "machine.h"

namespace cpusim {
namespace {

struct PerLane {
  uint8_t times[32] = {};
  uint8_t most = 0;
};

bool counting = false;
Traffic sums;
long long current_block = -1;
std::unordered_map<uint64_t, PerLane> bytes_of_block;  // by address, warp and direction
std::unordered_set<uint64_t> sectors_of_block;

void count(uintptr_t address, size_t bytes, bool write) {
  const Fiber& fiber = *machine.current;
  for (uintptr_t at = address; at < address + bytes; ++at) {
    PerLane& lanes = bytes_of_block[(static_cast<uint64_t>(at) << 6 | fiber.warp << 1) + write];  // 32 warps at most
    uint8_t& times = lanes.times[fiber.lane];
    if (times < 255 && ++times > lanes.most) {
      lanes.most = times;
      ++(write ? sums.written_bytes : sums.read_bytes);
    }
  }
  for (uintptr_t sector = address / 32; sector <= (address + bytes - 1) / 32; ++sector)
    if (sectors_of_block.insert(static_cast<uint64_t>(sector) << 1 | (write ? 1u : 0u)).second) ++(write ? sums.written_sectors : sums.read_sectors);
}

}  // namespace

void count_traffic(bool on) {
  counting = on;
  sums = Traffic();
}

const Traffic& traffic() { return sums; }

void note_traffic(uintptr_t address, size_t bytes, bool reads, bool writes) {
  if (!counting) return;
  if (machine.totals.blocks != current_block) {
    current_block = machine.totals.blocks;
    bytes_of_block.clear();
    sectors_of_block.clear();
  }
  if (reads) count(address, bytes, false);
  if (writes) count(address, bytes, true);
}

}  // namespace cpusim
