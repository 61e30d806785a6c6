// The tile registers of AMX, as Intel's manual defines them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace specexport {
namespace {

struct TileConfig {
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
TileConfig emulated_config;
uint8_t emulated_tiles[8][16][64];

void load_config(const TileConfig& config) {
  emulated_config = config;
  std::memset(emulated_tiles, 0, sizeof emulated_tiles);
}
void emulated_zero(int tile) { std::memset(emulated_tiles[tile], 0, sizeof emulated_tiles[tile]); }
void emulated_load(int tile, const void* from, int stride) {
  emulated_zero(tile);
  for (int r = 0; r < emulated_config.rows[tile]; r++)
    std::memcpy(emulated_tiles[tile][r], static_cast<const uint8_t*>(from) + stride * r, emulated_config.row_bytes[tile]);
}
void emulated_store(int tile, void* to) {
  for (int r = 0; r < emulated_config.rows[tile]; r++)
    std::memcpy(static_cast<uint8_t*>(to) + 64 * r, emulated_tiles[tile][r], emulated_config.row_bytes[tile]);
}
float emulated_bfloat(const uint8_t* p) {
  const uint8_t bytes[4] = {0, 0, p[0], p[1]};
  float number;
  std::memcpy(&number, bytes, 4);
  return number;
}
// Adds what `add` makes of four bytes of a row and four of a column to each sum, depth by depth.
template <typename Sum, typename Add>
void emulated_multiply(int sums, int x, int w, const Add& add) {
  for (int r = 0; r < emulated_config.rows[sums]; r++)
    for (int k = 0; k < emulated_config.row_bytes[x] / 4; k++)
      for (int c = 0; c < emulated_config.row_bytes[sums] / 4; c++) {
        Sum sum;
        std::memcpy(&sum, emulated_tiles[sums][r] + 4 * c, 4);
        add(sum, emulated_tiles[x][r] + 4 * k, emulated_tiles[w][k] + 4 * c);
        std::memcpy(emulated_tiles[sums][r] + 4 * c, &sum, 4);
      }
}
void emulated_bfloats(int sums, int x, int w) {
  emulated_multiply<float>(sums, x, w, [](float& sum, const uint8_t* a, const uint8_t* b) {
    for (int i = 0; i < 4; i += 2) sum += emulated_bfloat(a + i) * emulated_bfloat(b + i);
  });
}
template <typename Byte>
void emulated_bytes(int sums, int x, int w) {
  emulated_multiply<int32_t>(sums, x, w, [](int32_t& sum, const uint8_t* a, const uint8_t* b) {
    for (int i = 0; i < 4; i++) sum += Byte(a[i]) * int8_t(b[i]);
  });
}

}  // namespace
}  // namespace specexport

#define TILE_RELEASE() emulated_config = {}
#define TILE_ZERO emulated_zero
#define TILE_LOAD emulated_load
#define TILE_STORE emulated_store
#define TILE_MULTIPLY_BFLOATS emulated_bfloats
#define TILE_MULTIPLY_UPPER emulated_bytes<int8_t>
#define TILE_MULTIPLY_LOWER emulated_bytes<uint8_t>
