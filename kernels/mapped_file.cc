#include "mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace specexport {

void* map_large_pages(int file, size_t size, bool writable) {
  // Room in which there is an aligned address; what the file does not cover is returned.
  const size_t room = size + kLargePage;
  void* const reserved = mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (reserved == MAP_FAILED) return nullptr;
  uint8_t* const start = static_cast<uint8_t*>(reserved);
  const size_t before = (kLargePage - uintptr_t(start) % kLargePage) % kLargePage;
  const size_t page = size_t(sysconf(_SC_PAGESIZE)), covered = before + (size + page - 1) / page * page;
  void* const mapped =
      mmap(start + before, size, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED | MAP_FIXED, file, 0);
  if (mapped == MAP_FAILED) {
    munmap(reserved, room);
    return nullptr;
  }
  if (before) munmap(start, before);
  if (covered < room) munmap(start + covered, room - covered);
#ifdef MADV_HUGEPAGE
  madvise(mapped, size, MADV_HUGEPAGE);  // the mapping works without, too
#endif
  return mapped;
}

MappedFile::MappedFile(const std::string& path) {
  int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) throw std::runtime_error(path + ": cannot be opened: " + std::strerror(errno));
  struct stat status {};
  void* mapped = nullptr;
  if (fstat(file, &status) == 0 && status.st_size > 0) {
    size_ = static_cast<size_t>(status.st_size);
    mapped = mmap(nullptr, size_, PROT_READ, MAP_SHARED, file, 0);
  }
  int error = errno;
  close(file);
  if (mapped == MAP_FAILED) throw std::runtime_error(path + ": cannot be mapped: " + std::strerror(error));
  data_ = static_cast<const char*>(mapped);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(const_cast<char*>(data_), size_);
}

void MappedFile::release_pages() const {
  if (data_ != nullptr) madvise(const_cast<char*>(data_), size_, MADV_DONTNEED);
}

}  // namespace specexport
