// Counter-based random numbers: the mixer of SplitMix64 (Steele, Lea, Flood, 2014) over keys that name seed, sequence,
// position and stream. The formulas stand in accept_reference.py, the twin of this code.
#pragma once

#include <cstdint>

namespace localspec {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;
constexpr uint64_t kMix1 = 0xBF58476D1CE4E5B9u;
constexpr uint64_t kMix2 = 0x94D049BB133111EBu;

// What a number is for; two streams at one position are independent.
enum Stream : uint64_t { kTokenStream, kAcceptStream, kResidualStream, kDraftStream };

inline uint64_t mix(uint64_t x) {
    x += kGolden;
    x = (x ^ (x >> 30)) * kMix1;
    x = (x ^ (x >> 27)) * kMix2;
    return x ^ (x >> 31);
}

inline uint64_t row_key(uint64_t seed, uint64_t sequence, uint64_t position, Stream stream) {
    return mix(mix(mix(mix(seed) + sequence) + position) + stream);
}

// In (0, 1), exact: ((bits >> 12) + 1/2) / 2^52.
inline double uniform(uint64_t key, uint64_t token) {
    return (static_cast<double>(mix(key + token * kGolden) >> 12) + 0.5) * 0x1p-52;
}

}  // namespace localspec
