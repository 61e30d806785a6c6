// Files mapped into memory, those of weights in pages as large as the system has.
#pragma once

#include <cstddef>
#include <string>

namespace specexport {

constexpr size_t kLargePage = 2 << 20;

// Maps an open file, shared, at a multiple of kLargePage, and asks for large pages: with those of 4 KiB, reading weights
// waits for translations of addresses. Filesystems with large folios grant them. Returns null if it cannot be mapped.
void* map_large_pages(int file, size_t size, bool writable);

class MappedFile {
 public:
  // Throws std::runtime_error if the file cannot be mapped.
  explicit MappedFile(const std::string& path);
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  const char* data() const { return data_; }
  size_t size() const { return size_; }

  // Releases its pages to the system, which reads them again on use.
  void release_pages() const;

 private:
  const char* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace specexport
