#include "mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace specexport {

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
