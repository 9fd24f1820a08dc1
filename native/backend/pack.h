// Packing of GGUF weights into the layout of formats.h.
#pragma once

#include "formats.h"

namespace ls {

// Packs rows [row0, row0 + rows) of a matrix of k columns. src holds those rows as they lie in a GGUF file; dst is the start
// of the packed matrix. Rows are independent, so a matrix may be packed in parts and by several threads.
void pack_rows(const Format &f, const uint8_t *src, int64_t k, int64_t row0, int64_t rows, uint8_t *dst);

// The same backwards: writes the rows as a GGUF file holds them. Exact, byte for byte.
void unpack_rows(const Format &f, const uint8_t *packed, int64_t k, int64_t row0, int64_t rows, uint8_t *dst);

}  // namespace ls
