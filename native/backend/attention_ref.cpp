// The reference that the kernels are tested against: no blocks, no online softmax, no vectors, everything in double.
#include "attention.h"
#include "attention_plan.h"

#include <cmath>
#include <cstring>
#include <vector>

namespace {

double half_to_double(uint16_t h) {
    const int    exponent = (h >> 10) & 31;
    const double mantissa = h & 1023;
    double       x;
    if (exponent == 31) {
        x = mantissa == 0 ? INFINITY : NAN;
    } else if (exponent == 0) {
        x = std::ldexp(mantissa, -24);
    } else {
        x = std::ldexp(1024 + mantissa, exponent - 25);
    }
    return h & 0x8000 ? -x : x;
}

double half_at(const char * p) {
    uint16_t h;
    std::memcpy(&h, p, sizeof h);
    return half_to_double(h);
}

// Element i of a row. A Q8_0 row is blocks of 34 bytes: an f16 scale and 32 int8.
double element(const char * row, int type, int64_t i) {
    if (type == LS_ATT_F16) {
        return half_at(row + 2 * i);
    }
    if (type == LS_ATT_F32) {
        float x;
        std::memcpy(&x, row + 4 * i, sizeof x);
        return x;
    }
    const char * block = row + 34 * (i / 32);
    return half_at(block) * static_cast<signed char>(block[2 + i % 32]);
}

const char * row_at(const ls_att_tensor & t, int64_t i1, int64_t i2, int64_t i3) {
    return static_cast<const char *>(t.data) + i1 * t.nb[1] + i2 * t.nb[2] + i3 * t.nb[3];
}

} // namespace

extern "C" void ls_attention_reference(const ls_attention_args * a) {
    const int64_t DK = a->k.ne[0], DV = a->v.ne[0], n_kv = a->k.ne[1];
    const int64_t n_q = a->q.ne[1], n_head = a->q.ne[2], n_seq = a->q.ne[3];
    std::vector<double> logit(n_kv), out(DV);

    for (int64_t i3 = 0; i3 < n_seq; i3++) {
        for (int64_t h = 0; h < n_head; h++) {
            const int64_t k2 = h / (n_head / a->k.ne[2]), k3 = i3 / (n_seq / a->k.ne[3]);
            const int64_t v2 = h / (n_head / a->v.ne[2]), v3 = i3 / (n_seq / a->v.ne[3]);
            const double  slope = ls_att_slope(a, h);
            for (int64_t i1 = 0; i1 < n_q; i1++) {
                const char * q   = row_at(a->q, i1, h, i3);
                double       top = a->sinks ? a->sinks[h] : -INFINITY;
                for (int64_t j = 0; j < n_kv; j++) {
                    double bias = 0;
                    if (a->mask.data) {
                        bias = slope * half_at(row_at(a->mask, i1, h % a->mask.ne[2], i3 % a->mask.ne[3]) + 2 * j);
                    }
                    logit[j] = -INFINITY;
                    if (bias == -INFINITY) {
                        continue; // not even looked at: the cache may hold anything there
                    }
                    const char * k   = row_at(a->k, j, k2, k3);
                    double       dot = 0;
                    for (int64_t d = 0; d < DK; d++) {
                        dot += element(q, LS_ATT_F32, d) * element(k, a->k_type, d);
                    }
                    dot *= a->scale;
                    if (a->logit_softcap != 0) {
                        dot = a->logit_softcap * std::tanh(dot / a->logit_softcap);
                    }
                    logit[j] = dot + bias;
                    top      = std::fmax(top, logit[j]);
                }
                double sum = a->sinks ? std::exp(a->sinks[h] - top) : 0;
                out.assign(DV, 0);
                for (int64_t j = 0; j < n_kv; j++) {
                    if (logit[j] == -INFINITY) {
                        continue;
                    }
                    const double p = std::exp(logit[j] - top);
                    const char * v = row_at(a->v, j, v2, v3);
                    sum += p;
                    for (int64_t d = 0; d < DV; d++) {
                        out[d] += p * element(v, a->v_type, d);
                    }
                }
                char * dst = static_cast<char *>(a->dst) + h * a->nb_dst[1] + i1 * a->nb_dst[2] + i3 * a->nb_dst[3];
                for (int64_t d = 0; d < DV; d++) {
                    const float x = static_cast<float>(sum == 0 ? 0 : out[d] / sum); // no visible key: zero, as ggml gives
                    std::memcpy(dst + 4 * d, &x, sizeof x);
                }
            }
        }
    }
}
