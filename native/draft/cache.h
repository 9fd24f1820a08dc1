// What a draft's network remembers of one text: keys and values of a layer, and the rotation of positions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ls::draft {

// One layer's keys and values of one slot, in the layout that vector_math.h reads. Grows as positions are put.
class KeyValues {
   public:
    // Room for positions 0 ... n - 1; keeps what is there. `size` floats a head.
    void make_room(int64_t n, int64_t heads, int64_t size);
    void put(int64_t head, int64_t position, const float *key, const float *value);
    const float *keys(int64_t head) const { return &keys_[static_cast<size_t>(head * room_ * size_)]; }
    const float *values(int64_t head, int64_t position) const {
        return &values_[static_cast<size_t>((head * room_ + position) * size_)];
    }

   private:
    std::vector<float> keys_, values_;
    int64_t room_ = 0, size_ = 0;
};

// Angles of a position: speed j is base^(-2j/n_rot) over a factor of its own, where the file gives factors[n_rot / 2].
class Rope {
   public:
    Rope(int64_t n_rot, float base, const float *factors);
    void angles(int64_t position, float *cosines, float *sines) const;

   private:
    std::vector<float> speeds_;
};

}  // namespace ls::draft
