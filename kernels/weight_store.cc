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

#include "mapped_file.h"

namespace specexport {
namespace {

constexpr char kMagic[8] = {'S', 'P', 'X', 'P', 'A', 'C', 'K', '2'};
constexpr size_t kHeader = sizeof kMagic + 2 * sizeof(uint64_t);

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
  if (matrices.empty()) return;
  uint64_t hash = 14695981039346656037u;
  size_t bytes = 0;
  for (const Matrix& matrix : matrices) {
    const PackedWeights form = packed_form(matrix, false);
    const int32_t numbers[] = {int(form.kind), form.depth,       form.columns,     form.block,
                               form.zero_points, int(form.layout), matrix.transposed};
    hash = mix(hash, numbers, sizeof numbers);
    hash = mix_samples(mix_samples(hash, matrix.weights), matrix.scales);
    bytes += form.bytes();
  }
  std::string path;
  if (!store.folder.empty() && bytes > (1 << 20)) {
    char name[32];
    std::snprintf(name, sizeof name, ".%016llx", static_cast<unsigned long long>(hash));
    path = store.folder + "/" + store.key + name;
    if (map(path, hash, matrices)) return;
  }
  std::vector<uint8_t> half_scales;
  for (const Matrix& matrix : matrices) half_scales.push_back(has_half_scales(matrix));
  lay_out(matrices, half_scales);
  if (!path.empty() && write(path, hash, matrices) && map(path, hash, matrices)) return;
  if (posix_memalign(&memory_, kLargePage, size_)) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  madvise(memory_, size_, MADV_HUGEPAGE);
#endif
  uint8_t* base = static_cast<uint8_t*>(memory_);
  for (size_t i = 0; i < matrices.size(); i++) pack(matrices[i], forms_[i], base + offsets_[i], machine_threads());
  place(base);
}

WeightStore::~WeightStore() {
  std::free(memory_);
  if (mapping_) munmap(mapping_, size_);
}

void WeightStore::lay_out(const std::vector<Matrix>& matrices, const std::vector<uint8_t>& half_scales) {
  forms_.clear();
  offsets_.clear();
  size_ = (kHeader + matrices.size() + 63) / 64 * 64;
  for (const Matrix& matrix : matrices) {
    forms_.push_back(packed_form(matrix, half_scales[forms_.size()]));
    size_t same = 0;  // a matrix that several products read
    while (matrices[same].weights != matrix.weights || matrices[same].scales != matrix.scales) same++;
    offsets_.push_back(same + 1 < forms_.size() ? offsets_[same] : size_);
    if (offsets_.back() == size_) size_ += (forms_.back().bytes() + 63) / 64 * 64;
  }
}

void WeightStore::place(const uint8_t* base) {
  for (size_t i = 0; i < forms_.size(); i++) forms_[i].data = base + offsets_[i];
}

bool WeightStore::map(const std::string& path, uint64_t hash, const std::vector<Matrix>& matrices) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  std::vector<uint8_t> header(kHeader + matrices.size());
  uint64_t numbers[2];
  struct stat status;
  void* mapping = nullptr;
  if (fstat(file, &status) == 0 && S_ISREG(status.st_mode) &&
      pread(file, header.data(), header.size(), 0) == ssize_t(header.size()) &&
      std::memcmp(header.data(), kMagic, sizeof kMagic) == 0) {
    std::memcpy(numbers, header.data() + sizeof kMagic, sizeof numbers);
    lay_out(matrices, std::vector<uint8_t>(header.begin() + kHeader, header.end()));
    if (numbers[0] == size_ && numbers[1] == hash && uint64_t(status.st_size) == size_)
      mapping = map_large_pages(file, size_, false);
  }
  close(file);
  if (!mapping) return false;
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
    void* mapping = map_large_pages(file, size_, true);
    whole = mapping != nullptr;
    if (whole) {
      uint8_t* base = static_cast<uint8_t*>(mapping);
      for (size_t i = 0; i < matrices.size(); i++) pack(matrices[i], forms_[i], base + offsets_[i], machine_threads());
      std::memcpy(base, kMagic, sizeof kMagic);
      const uint64_t numbers[2] = {size_, hash};
      std::memcpy(base + sizeof kMagic, numbers, sizeof numbers);
      for (size_t i = 0; i < forms_.size(); i++) base[kHeader + i] = forms_[i].half_scales;
      munmap(mapping, size_);
    }
  }
  close(file);
  whole = whole && rename(temporary.c_str(), path.c_str()) == 0;
  if (!whole) unlink(temporary.c_str());
  return whole;
}

}  // namespace specexport
