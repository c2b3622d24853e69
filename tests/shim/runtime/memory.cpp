#include "memory.h"

#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <vector>

#include "races.h"

namespace cpusim {
namespace {

struct Buffer : Region {
  char* mapping = nullptr;
  size_t mapping_bytes = 0;
};

constexpr size_t kSharedArena = size_t{256} << 10;
constexpr size_t kSharedGap = 256;  // between shared arrays

struct SharedArray : Region {
  const void* key = nullptr;
};

std::vector<std::unique_ptr<Buffer>> buffers;
std::vector<SharedArray> shared_arrays;  // of the running block
char* shared_arena = nullptr;
Cell* shared_cells = nullptr;
size_t shared_used = 0, shared_declared = 0, dynamic_bytes = 0;
uint8_t poison = 0xA5;

size_t page_up(size_t bytes) {
  static const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

std::string distance(const Region& r, uintptr_t address) {
  if (address >= r.begin + r.bytes)
    return std::to_string(address - r.begin - r.bytes) + " bytes past the end of " + r.name + " of " + std::to_string(r.bytes) + " bytes";
  if (address < r.begin) return std::to_string(r.begin - address) + " bytes before " + r.name + " of " + std::to_string(r.bytes) + " bytes";
  return "across the end of " + r.name + " of " + std::to_string(r.bytes) + " bytes";
}

size_t gap_to(const Region& r, uintptr_t address) {
  return address < r.begin ? r.begin - address : address >= r.begin + r.bytes ? address - r.begin - r.bytes : 0;
}

}  // namespace

void* reserve(size_t bytes) {
  void* start = mmap(nullptr, page_up(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return start == MAP_FAILED ? nullptr : start;
}

void unreserve(void* start, size_t bytes) {
  if (start) munmap(start, page_up(bytes));
}

void* allocate(size_t bytes, const std::string& name) {
  auto buffer = std::make_unique<Buffer>();
  const size_t inside = page_up(bytes ? bytes : 1);
  buffer->mapping_bytes = inside + 2 * kGuardBytes;
  void* mapping = mmap(nullptr, buffer->mapping_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) return nullptr;
  buffer->mapping = static_cast<char*>(mapping);
  char* start = buffer->mapping + kGuardBytes;
  buffer->cells = static_cast<Cell*>(reserve((bytes ? bytes : 1) * sizeof(Cell)));
  if (!buffer->cells || mprotect(start, inside, PROT_READ | PROT_WRITE)) {
    munmap(mapping, buffer->mapping_bytes);
    return nullptr;
  }
  buffer->begin = reinterpret_cast<uintptr_t>(start);
  buffer->bytes = bytes;
  buffer->name = name;
  memset(start, poison, bytes);
  buffers.push_back(std::move(buffer));
  return start;
}

bool release(void* pointer) {
  for (size_t i = 0; i < buffers.size(); ++i)
    if (buffers[i]->begin == reinterpret_cast<uintptr_t>(pointer)) {
      munmap(buffers[i]->mapping, buffers[i]->mapping_bytes);
      unreserve(buffers[i]->cells, (buffers[i]->bytes ? buffers[i]->bytes : 1) * sizeof(Cell));
      buffers.erase(buffers.begin() + static_cast<std::ptrdiff_t>(i));
      return true;
    }
  return false;
}

long long live_buffers() { return static_cast<long long>(buffers.size()); }

const Region* device_region(uintptr_t address, size_t size) {
  static size_t last = 0;
  if (last < buffers.size() && buffers[last]->holds(address, size)) return buffers[last].get();
  for (size_t i = 0; i < buffers.size(); ++i)
    if (buffers[i]->holds(address, size)) return buffers[last = i].get();
  return nullptr;
}

std::string neighbourhood(uintptr_t address) {
  const Region* nearest = nullptr;
  const auto consider = [&](const Region& r) {
    if (!nearest || gap_to(r, address) < gap_to(*nearest, address)) nearest = &r;
  };
  if (in_shared_memory(address)) {
    for (const SharedArray& array : shared_arrays) consider(array);
  } else {
    for (const auto& buffer : buffers)
      if (gap_to(*buffer, address) <= kGuardBytes) consider(*buffer);
  }
  return nearest ? distance(*nearest, address) : std::string();
}

void forget_shared() {
  shared_arrays.clear();
  shared_used = shared_declared = 0;
}

void set_dynamic_shared(size_t bytes) { dynamic_bytes = bytes; }

void* dynamic_shared_start() {
  static const char key = 0;
  return shared_array_at(&key, dynamic_bytes, 16);
}

void* shared_array_at(const void* key, size_t bytes, size_t alignment) {
  for (const SharedArray& array : shared_arrays)
    if (array.key == key) return reinterpret_cast<void*>(array.begin);
  if (!shared_arena) {
    shared_arena = static_cast<char*>(reserve(kSharedArena));
    shared_cells = static_cast<Cell*>(reserve(kSharedArena * sizeof(Cell)));
    if (!shared_arena || !shared_cells) return nullptr;
  }
  // CUDA promises an array no more than its type's alignment; neither do we, so that a vector access which works by luck is seen.
  const size_t at = (shared_used + kSharedGap + 15) / 16 * 16 + (alignment < 16 ? alignment : 0);
  shared_declared += bytes;
  const size_t limit = dynamic_bytes > kStaticSharedBytes ? kLargestSharedBytes : kStaticSharedBytes;
  if (shared_declared > limit || at + bytes + kSharedGap > kSharedArena) return nullptr;
  SharedArray array;
  array.key = key;
  array.begin = reinterpret_cast<uintptr_t>(shared_arena + at);
  array.bytes = bytes;
  array.cells = shared_cells + at;
  array.shared = true;
  array.name = "a shared array";
  shared_used = at + bytes;
  memset(shared_arena + at, poison, bytes);
  shared_arrays.push_back(array);
  return shared_arena + at;
}

const Region* shared_region(uintptr_t address, size_t size) {
  for (const SharedArray& array : shared_arrays)
    if (array.holds(address, size)) return &array;
  return nullptr;
}

bool in_shared_memory(uintptr_t address) { return shared_arena && address - reinterpret_cast<uintptr_t>(shared_arena) < kSharedArena; }

namespace {

struct LoadedLibrary {
  uintptr_t base = 0, begin = 0, end = 0;
};

const LoadedLibrary& library() {
  static const LoadedLibrary found = [] {
    LoadedLibrary result;
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* out) {
          LoadedLibrary object{info->dlpi_addr, UINTPTR_MAX, 0};
          for (int i = 0; i < info->dlpi_phnum; ++i)
            if (info->dlpi_phdr[i].p_type == PT_LOAD) {
              const uintptr_t begin = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr, end = begin + info->dlpi_phdr[i].p_memsz;
              object.begin = begin < object.begin ? begin : object.begin;
              object.end = end > object.end ? end : object.end;
            }
          const uintptr_t mine = reinterpret_cast<uintptr_t>(&poison);
          if (mine < object.begin || mine >= object.end) return 0;
          *static_cast<LoadedLibrary*>(out) = object;
          return 1;
        },
        &result);
    return result;
  }();
  return found;
}

}  // namespace

bool in_library(uintptr_t address, size_t size) { return address >= library().begin && address + size <= library().end; }

uintptr_t library_offset(uintptr_t address) { return address - library().base; }

uint8_t poison_byte() { return poison; }
void set_poison(uint8_t byte) { poison = byte; }

}  // namespace cpusim
