#include "weight_store.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>

namespace specexport {
namespace {

constexpr char kMagic[8] = {'S', 'P', 'X', 'P', 'A', 'C', 'K', '1'};
constexpr size_t kHeader = 64;

// Knuth's and FNV's: a name for content, not a defence against who may write to the cache folder.
uint64_t mix(uint64_t hash, const void* data, size_t bytes) {
  const uint8_t* p = static_cast<const uint8_t*>(data);
  for (size_t i = 0; i < bytes; i++) hash = (hash ^ p[i]) * 1099511628211u;
  return hash;
}

uint64_t mix_samples(uint64_t hash, const Value* value) {
  if (!value || !value->data) return hash;
  const uint8_t* p = static_cast<const uint8_t*>(value->data);
  const size_t piece = value->bytes < 64 ? value->bytes : 64;
  hash = mix(hash, p, piece);
  hash = mix(hash, p + value->bytes / 2 / 64 * 64, piece <= value->bytes - value->bytes / 2 / 64 * 64 ? piece : 0);
  return mix(hash, p + value->bytes - piece, piece);
}

int machine_threads() {
  const unsigned count = std::thread::hardware_concurrency();
  return count ? int(count) : 1;
}

}  // namespace

WeightStore::WeightStore(const Store& store, const std::vector<Matrix>& matrices) {
  uint64_t hash = 14695981039346656037u;
  size_ = kHeader;
  for (const Matrix& matrix : matrices) {
    PackedWeights form = packed_form(matrix);
    const int32_t numbers[] = {int(form.kind), form.depth, form.columns, form.block, form.zero_points, form.half_scales,
                               int(form.layout), matrix.transposed};
    hash = mix(hash, numbers, sizeof numbers);
    hash = mix_samples(mix_samples(hash, matrix.weights), matrix.scales);
    forms_.push_back(form);
    size_t same = 0;  // a matrix that several products read
    while (matrices[same].weights != matrix.weights || matrices[same].scales != matrix.scales) same++;
    offsets_.push_back(same + 1 < forms_.size() ? offsets_[same] : size_);
    if (offsets_.back() == size_) size_ += (form.bytes() + 63) / 64 * 64;
  }
  if (matrices.empty()) return;
  if (!store.folder.empty() && size_ > (1 << 20)) {
    char name[32];
    std::snprintf(name, sizeof name, ".%016llx", static_cast<unsigned long long>(hash));
    const std::string path = store.folder + "/" + store.key + name;
    if (map(path, hash) || (write(path, hash, matrices) && map(path, hash))) return;
  }
  if (posix_memalign(&memory_, 4096, size_)) throw std::bad_alloc();
  uint8_t* base = static_cast<uint8_t*>(memory_);
  for (size_t i = 0; i < matrices.size(); i++) pack(matrices[i], forms_[i], base + offsets_[i], machine_threads());
  place(base);
}

WeightStore::~WeightStore() {
  std::free(memory_);
  if (mapping_) munmap(mapping_, size_);
}

void WeightStore::place(const uint8_t* base) {
  for (size_t i = 0; i < forms_.size(); i++) forms_[i].data = base + offsets_[i];
}

bool WeightStore::map(const std::string& path, uint64_t hash) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  struct stat status;
  void* mapping = MAP_FAILED;
  if (fstat(file, &status) == 0 && S_ISREG(status.st_mode) && size_t(status.st_size) == size_)
    mapping = mmap(nullptr, size_, PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (mapping == MAP_FAILED) return false;
  uint64_t numbers[2];
  std::memcpy(numbers, static_cast<const char*>(mapping) + sizeof kMagic, sizeof numbers);
  if (std::memcmp(mapping, kMagic, sizeof kMagic) || numbers[0] != size_ || numbers[1] != hash) {
    munmap(mapping, size_);
    return false;
  }
  madvise(mapping, size_, MADV_WILLNEED);
  mapping_ = mapping;
  place(static_cast<const uint8_t*>(mapping));
  return true;
}

bool WeightStore::write(const std::string& path, uint64_t hash, const std::vector<Matrix>& matrices) {
  const std::string folder = path.substr(0, path.rfind('/'));
  for (size_t slash = 1; slash != std::string::npos;) {  // and the folders above it
    slash = folder.find('/', slash + 1);
    mkdir(folder.substr(0, slash).c_str(), 0777);
  }
  struct statvfs disk;
  if (statvfs(folder.c_str(), &disk) || uint64_t(disk.f_bavail) * disk.f_frsize < 2 * size_) return false;
  std::string temporary = path + ".XXXXXX";
  const int file = mkstemp(temporary.data());
  if (file < 0) return false;
  bool whole = ftruncate(file, off_t(size_)) == 0 && posix_fallocate(file, 0, off_t(size_)) == 0;
  if (whole) {
    void* mapping = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    whole = mapping != MAP_FAILED;
    if (whole) {
      uint8_t* base = static_cast<uint8_t*>(mapping);
      for (size_t i = 0; i < matrices.size(); i++) pack(matrices[i], forms_[i], base + offsets_[i], machine_threads());
      std::memcpy(base, kMagic, sizeof kMagic);
      const uint64_t numbers[2] = {size_, hash};
      std::memcpy(base + sizeof kMagic, numbers, sizeof numbers);
      munmap(mapping, size_);
    }
  }
  close(file);
  whole = whole && rename(temporary.c_str(), path.c_str()) == 0;
  if (!whole) unlink(temporary.c_str());
  return whole;
}

}  // namespace specexport
