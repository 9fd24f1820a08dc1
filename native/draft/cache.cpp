#include "cache.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "vector_math.h"

namespace ls::draft {

void KeyValues::make_room(int64_t n, int64_t heads, int64_t size) {
    if (n <= room_) return;
    const int64_t room = std::max((n + 255) / 256 * 256, 2 * room_), per_head = room * size;
    std::vector<float> keys(static_cast<size_t>(per_head * heads)), values(keys.size());
    const auto old = static_cast<size_t>(room_ * size);
    for (int64_t h = 0; h < heads && old; h++) {
        std::memcpy(&keys[static_cast<size_t>(h * per_head)], &keys_[static_cast<size_t>(h) * old], 4 * old);
        std::memcpy(&values[static_cast<size_t>(h * per_head)], &values_[static_cast<size_t>(h) * old], 4 * old);
    }
    keys_.swap(keys);
    values_.swap(values);
    room_ = room;
    size_ = size;
}

void KeyValues::put(int64_t head, int64_t position, const float *key, const float *value) {
    float *const keys = &keys_[static_cast<size_t>(head * room_ * size_)];
    float *const to = keys + position / kKeyBlock * size_ * kKeyBlock + position % kKeyBlock;
    for (int64_t d = 0; d < size_; d++) to[d * kKeyBlock] = key[d];
    std::memcpy(&values_[static_cast<size_t>((head * room_ + position) * size_)], value, static_cast<size_t>(size_) * 4);
}

Rope::Rope(int64_t n_rot, float base, const float *factors) {
    speeds_.resize(static_cast<size_t>(n_rot / 2));
    for (int64_t j = 0; j < n_rot / 2; j++) {
        const float factor = factors != nullptr ? factors[j] : 1.0f;
        speeds_[static_cast<size_t>(j)] = std::pow(base, -2.0f * float(j) / float(n_rot)) / factor;
    }
}

void Rope::angles(int64_t position, float *cosines, float *sines) const {
    for (size_t j = 0; j < speeds_.size(); j++) {
        const float a = static_cast<float>(position) * speeds_[j];
        cosines[j] = std::cos(a);
        sines[j] = std::sin(a);
    }
}

}  // namespace ls::draft
