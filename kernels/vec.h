// One vector of 32-bit lanes, in the widest form the level has.
//
// A lane of an operand is one float (f32) or two bf16 (a pair along the contracted axis), so that the
// matrix kernel is written once: `madd` multiplies lanes and adds into float accumulators.
// Everything lives in the level's own namespace: nothing here may be shared between levels.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace inferd::INFERD_LEVEL {

struct bf16 {
    uint16_t bits;
};

inline float to_float(bf16 x) {
    uint32_t u = uint32_t(x.bits) << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
inline float to_float(float x) { return x; }
inline bf16 to_bf16(float f) {  // round to nearest even; a NaN stays one
    uint32_t u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return {uint16_t((u >> 16) | 0x40)};
    return {uint16_t((u + 0x7fffu + ((u >> 16) & 1)) >> 16)};
}
template <class T>
inline T from_float(float f);
template <>
inline float from_float<float>(float f) { return f; }
template <>
inline bf16 from_float<bf16>(float f) { return to_bf16(f); }

// IEEE half precision, exactly.
inline float half_to_float(uint16_t h) {
    const uint32_t magnitude = h & 0x7fffu, sign = uint32_t(h & 0x8000u) << 16;
    uint32_t u = magnitude >= 0x7c00u ? 0x7f800000u | (magnitude & 0x3ffu) << 13 : (magnitude << 13) + (112u << 23);
    float f;
    memcpy(&f, &u, 4);
    if (magnitude < 0x400u) f = float(magnitude) * 5.9604644775390625e-8f;  // below the normal numbers
    memcpy(&u, &f, 4);
    u |= sign;
    memcpy(&f, &u, 4);
    return f;
}

inline uint32_t lane_at(const void* p) {
    uint32_t u;
    memcpy(&u, p, 4);
    return u;
}

#if defined(__AVX512F__) && defined(__AVX512BW__)

struct Vec {
    static constexpr int width = 16;
    static constexpr int max_columns = 4;  // vectors of one row that the matrix kernel keeps in registers
    __m512 v;

    static Vec zero() { return {_mm512_setzero_ps()}; }
    static Vec all(float x) { return {_mm512_set1_ps(x)}; }
    static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
    static Vec load(const bf16* p) {
        return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
    }
    static Vec lanes(const uint32_t* p) { return {_mm512_castsi512_ps(_mm512_loadu_si512(p))}; }
    static Vec spread(uint32_t lane) { return {_mm512_castsi512_ps(_mm512_set1_epi32(int(lane)))}; }
    void store(float* p) const { _mm512_storeu_ps(p, v); }
    void store(bf16* p) const { _mm256_storeu_si256((__m256i*)p, narrow()); }
    void store_lanes(uint32_t* p) const { _mm512_storeu_si512(p, _mm512_castps_si512(v)); }
    __m256i narrow() const {
#if defined(__AVX512BF16__)
        return (__m256i)_mm512_cvtneps_pbh(v);
#else
        __m512i u = _mm512_castps_si512(v);
        __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
        __m512i r = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
        __m512i nan = _mm512_or_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
        r = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), r, nan);
        return _mm512_cvtepi32_epi16(r);
#endif
    }
    friend Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
    friend Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
    friend Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
    friend Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
    static Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
    static Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
    static Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
    static Vec round(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
    static Vec pow2(Vec n) { return {_mm512_scalef_ps(_mm512_set1_ps(1.0f), n.v)}; }
    static Vec where_less(Vec a, Vec b, Vec yes, Vec no) {
        return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
    }
    float sum() const { return _mm512_reduce_add_ps(v); }
    float top() const { return _mm512_reduce_max_ps(v); }
    static Vec madd_f32(Vec acc, Vec a, Vec b) { return fma(a, b, acc); }
    static Vec madd_bf16(Vec acc, Vec a, Vec b) {
#if defined(__AVX512BF16__)
        return {_mm512_dpbf16_ps(acc.v, (__m512bh)a.v, (__m512bh)b.v)};
#else
        const __m512i high = _mm512_set1_epi32(int(0xffff0000u));
        __m512i ai = _mm512_castps_si512(a.v), bi = _mm512_castps_si512(b.v);
        __m512 s = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(ai, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(bi, 16)), acc.v);
        return {_mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(ai, high)), _mm512_castsi512_ps(_mm512_and_si512(bi, high)), s)};
#endif
    }
    static Vec halves(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
    // To the nearest whole number, as bytes, at most as large as they can be.
    void store_bytes(int8_t* p) const { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v))); }
    // Lanes of a width x width block turned over its diagonal.
    __attribute__((always_inline)) static void transpose(Vec* r) {
        __m512i t[16], u[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i += 2) {
            __m512i a = _mm512_castps_si512(r[i].v), b = _mm512_castps_si512(r[i + 1].v);
            t[i] = _mm512_unpacklo_epi32(a, b);
            t[i + 1] = _mm512_unpackhi_epi32(a, b);
        }
#pragma GCC unroll 16
        for (int i = 0; i < 16; i += 4) {
            u[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
            u[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
            u[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
            u[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < 4; i++) {
            t[i] = _mm512_shuffle_i32x4(u[i], u[i + 4], 0x88);
            t[i + 4] = _mm512_shuffle_i32x4(u[i], u[i + 4], 0xdd);
            t[i + 8] = _mm512_shuffle_i32x4(u[i + 8], u[i + 12], 0x88);
            t[i + 12] = _mm512_shuffle_i32x4(u[i + 8], u[i + 12], 0xdd);
        }
#pragma GCC unroll 16
        for (int i = 0; i < 4; i++) {
            r[i].v = _mm512_castsi512_ps(_mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
            r[i + 4].v = _mm512_castsi512_ps(_mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88));
            r[i + 8].v = _mm512_castsi512_ps(_mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
            r[i + 12].v = _mm512_castsi512_ps(_mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd));
        }
    }
};

// Lanes of integers: of 32 bits, or four bytes along the contracted axis. With accumulators of any other type (float, or
// __m512i, which is of 64-bit lanes) GCC copies each of them at every step, and spills.
struct Whole {
    typedef int Lanes __attribute__((vector_size(64)));
    Lanes v;

    static Whole of(__m512i x) { return {(Lanes)x}; }
    __m512i raw() const { return (__m512i)v; }
    static Whole lanes(const void* p) { return of(_mm512_loadu_si512(p)); }
    static Whole spread(uint32_t lane) { return of(_mm512_set1_epi32(int(lane))); }
    static Whole bytes(const uint8_t* p) { return of(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))); }
    void store(void* p) const { _mm512_storeu_si512(p, raw()); }
    static Whole near(Vec x) { return of(_mm512_cvtps_epi32(x.v)); }
    Vec floats() const { return {_mm512_cvtepi32_ps(raw())}; }
    Whole low_nibbles() const { return of(_mm512_and_si512(raw(), _mm512_set1_epi8(15))); }
    Whole high_nibbles() const { return of(_mm512_and_si512(_mm512_srli_epi32(raw(), 4), _mm512_set1_epi8(15))); }
    // a + b * c of 32-bit integers.
    static Whole add_product(Whole a, Whole b, Whole c) { return of(_mm512_add_epi32(a.raw(), _mm512_mullo_epi32(b.raw(), c.raw()))); }
    static Whole add_bytes(Whole a, Whole b) { return of(_mm512_add_epi8(a.raw(), b.raw())); }
    int32_t sum() const { return _mm512_reduce_add_epi32(raw()); }
    // acc + the two products of signed numbers of 16 bits.
    static Whole dot_pairs(Whole acc, Whole a, Whole b) {
#if defined(__AVX512VNNI__)
        return of(_mm512_dpwssd_epi32(acc.raw(), a.raw(), b.raw()));
#else
        return of(_mm512_add_epi32(acc.raw(), _mm512_madd_epi16(a.raw(), b.raw())));
#endif
    }
    // acc + the four products of unsigned bytes with signed ones.
    static Whole dot(Whole acc, Whole u, Whole s) {
#if defined(__AVX512VNNI__)
        return of(_mm512_dpbusd_epi32(acc.raw(), u.raw(), s.raw()));
#else
        const __m512i x = u.raw(), y = s.raw();
        const __m512i even = _mm512_madd_epi16(_mm512_and_si512(x, _mm512_set1_epi16(255)), _mm512_srai_epi16(_mm512_slli_epi16(y, 8), 8));
        const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(x, 8), _mm512_srai_epi16(y, 8));
        return of(_mm512_add_epi32(acc.raw(), _mm512_add_epi32(even, odd)));
#endif
    }
};

#elif defined(__AVX2__)

struct Vec {
    static constexpr int width = 8;
    static constexpr int max_columns = 2;
    __m256 v;

    static Vec zero() { return {_mm256_setzero_ps()}; }
    static Vec all(float x) { return {_mm256_set1_ps(x)}; }
    static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
    static Vec load(const bf16* p) {
        return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16))};
    }
    static Vec lanes(const uint32_t* p) { return {_mm256_castsi256_ps(_mm256_loadu_si256((const __m256i*)p))}; }
    static Vec spread(uint32_t lane) { return {_mm256_castsi256_ps(_mm256_set1_epi32(int(lane)))}; }
    void store(float* p) const { _mm256_storeu_ps(p, v); }
    void store(bf16* p) const {
        __m256i u = _mm256_castps_si256(v);
        __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
        __m256i r = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
        __m256i nan = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
        r = _mm256_blendv_epi8(r, nan, _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
        _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1)));
    }
    void store_lanes(uint32_t* p) const { _mm256_storeu_si256((__m256i*)p, _mm256_castps_si256(v)); }
    friend Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
    friend Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
    friend Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
    friend Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
    static Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
    static Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
    static Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
    static Vec round(Vec a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
    static Vec pow2(Vec n) {
        return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23))};
    }
    static Vec where_less(Vec a, Vec b, Vec yes, Vec no) {
        return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
    }
    float sum() const {
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        s = _mm_add_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
    }
    float top() const {
        __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        s = _mm_max_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
    }
    static Vec madd_f32(Vec acc, Vec a, Vec b) { return fma(a, b, acc); }
    static Vec madd_bf16(Vec acc, Vec a, Vec b) {
        const __m256i high = _mm256_set1_epi32(int(0xffff0000u));
        __m256i ai = _mm256_castps_si256(a.v), bi = _mm256_castps_si256(b.v);
        __m256 s = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(ai, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(bi, 16)), acc.v);
        return {_mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(ai, high)), _mm256_castsi256_ps(_mm256_and_si256(bi, high)), s)};
    }
    static Vec halves(const uint16_t* p) { return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p))}; }
    void store_bytes(int8_t* p) const {
        const __m256i whole = _mm256_cvtps_epi32(v);
        const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
        _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
    }
    __attribute__((always_inline)) static void transpose(Vec* r) {
        __m256 t[8], u[8];
#pragma GCC unroll 16
        for (int i = 0; i < 8; i += 2) {
            t[i] = _mm256_unpacklo_ps(r[i].v, r[i + 1].v);
            t[i + 1] = _mm256_unpackhi_ps(r[i].v, r[i + 1].v);
        }
#pragma GCC unroll 16
        for (int i = 0; i < 8; i += 4) {
            u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
            u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
            u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
            u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
        }
#pragma GCC unroll 16
        for (int i = 0; i < 4; i++) {
            r[i].v = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
            r[i + 4].v = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
        }
    }
};

struct Whole {
    __m256i v;

    static Whole lanes(const void* p) { return {_mm256_loadu_si256((const __m256i*)p)}; }
    static Whole spread(uint32_t lane) { return {_mm256_set1_epi32(int(lane))}; }
    static Whole bytes(const uint8_t* p) { return {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p))}; }
    void store(void* p) const { _mm256_storeu_si256((__m256i*)p, v); }
    static Whole near(Vec x) { return {_mm256_cvtps_epi32(x.v)}; }
    Vec floats() const { return {_mm256_cvtepi32_ps(v)}; }
    Whole low_nibbles() const { return {_mm256_and_si256(v, _mm256_set1_epi8(15))}; }
    Whole high_nibbles() const { return {_mm256_and_si256(_mm256_srli_epi32(v, 4), _mm256_set1_epi8(15))}; }
    static Whole add_product(Whole a, Whole b, Whole c) { return {_mm256_add_epi32(a.v, _mm256_mullo_epi32(b.v, c.v))}; }
    static Whole add_bytes(Whole a, Whole b) { return {_mm256_add_epi8(a.v, b.v)}; }
    int32_t sum() const {
        int32_t part[8], all = 0;
        store(part);
        for (const int32_t each : part) all += each;
        return all;
    }
    static Whole dot_pairs(Whole acc, Whole a, Whole b) { return {_mm256_add_epi32(acc.v, _mm256_madd_epi16(a.v, b.v))}; }
    static Whole dot(Whole acc, Whole u, Whole s) {
        // Not maddubs, whose sums of two saturate.
        const __m256i even = _mm256_madd_epi16(_mm256_and_si256(u.v, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(s.v, 8), 8));
        const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u.v, 8), _mm256_srai_epi16(s.v, 8));
        return {_mm256_add_epi32(acc.v, _mm256_add_epi32(even, odd))};
    }
};

#else

// GCC and Clang vector extensions: SSE2 on x86-64, NEON on ARM, scalar code elsewhere.
struct Vec {
    static constexpr int width = 4;
    static constexpr int max_columns = 2;
    typedef float Floats __attribute__((vector_size(16)));
    typedef uint32_t Words __attribute__((vector_size(16)));
    Floats v;

    static Vec zero() { return all(0.0f); }
    static Vec all(float x) { return {Floats{x, x, x, x}}; }
    static Vec load(const float* p) {
        Vec r;
        memcpy(&r.v, p, 16);
        return r;
    }
    static Vec load(const bf16* p) { return {Floats{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])}}; }
    static Vec lanes(const uint32_t* p) {
        Vec r;
        memcpy(&r.v, p, 16);
        return r;
    }
    static Vec spread(uint32_t lane) { return {(Floats)Words{lane, lane, lane, lane}}; }
    void store(float* p) const { memcpy(p, &v, 16); }
    void store(bf16* p) const {
        for (int i = 0; i < 4; i++) p[i] = to_bf16(v[i]);
    }
    void store_lanes(uint32_t* p) const { memcpy(p, &v, 16); }
    friend Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
    friend Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
    friend Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
    friend Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
    static Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
    static Vec max(Vec a, Vec b) { return {a.v > b.v ? a.v : b.v}; }  // b where either is NaN, as on x86
    static Vec min(Vec a, Vec b) { return {a.v < b.v ? a.v : b.v}; }
    static Vec round(Vec a) {  // adding 1.5 * 2^23 rounds to nearest even, for |a| < 2^22
        volatile Floats shifted = a.v + 12582912.0f;
        return {shifted - 12582912.0f};
    }
    static Vec pow2(Vec n) {
        Words w;
        for (int i = 0; i < 4; i++) w[i] = uint32_t(int(n.v[i]) + 127) << 23;
        return {(Floats)w};
    }
    static Vec where_less(Vec a, Vec b, Vec yes, Vec no) { return {a.v < b.v ? yes.v : no.v}; }
    float sum() const { return (v[0] + v[2]) + (v[1] + v[3]); }
    float top() const {
        float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
        return a > b ? a : b;
    }
    static Vec madd_f32(Vec acc, Vec a, Vec b) { return fma(a, b, acc); }
    static Vec madd_bf16(Vec acc, Vec a, Vec b) {
        Words ai = (Words)a.v, bi = (Words)b.v;
        Floats s = (Floats)(ai << 16) * (Floats)(bi << 16) + acc.v;
        return {(Floats)(ai & 0xffff0000u) * (Floats)(bi & 0xffff0000u) + s};
    }
    static Vec halves(const uint16_t* p) {
        return {Floats{half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])}};
    }
    void store_bytes(int8_t* p) const {
        const Vec near = round(min(max(*this, all(-128.0f)), all(127.0f)));
        for (int i = 0; i < 4; i++) p[i] = int8_t(near.v[i]);
    }
    static void transpose(Vec* r) {
        for (int i = 0; i < 4; i++)
            for (int j = i + 1; j < 4; j++) {
                float t = r[i].v[j];
                r[i].v[j] = r[j].v[i];
                r[j].v[i] = t;
            }
    }
};

struct Whole {
    typedef uint32_t Words __attribute__((vector_size(16)));
    Words v;

    static Whole lanes(const void* p) {
        Whole r;
        memcpy(&r.v, p, 16);
        return r;
    }
    static Whole spread(uint32_t lane) { return {Words{lane, lane, lane, lane}}; }
    static Whole bytes(const uint8_t* p) { return {Words{p[0], p[1], p[2], p[3]}}; }
    void store(void* p) const { memcpy(p, &v, 16); }
    static Whole near(Vec x) {
        x = Vec::round(x);
        return {Words{uint32_t(int32_t(x.v[0])), uint32_t(int32_t(x.v[1])), uint32_t(int32_t(x.v[2])), uint32_t(int32_t(x.v[3]))}};
    }
    Vec floats() const { return {Vec::Floats{float(int32_t(v[0])), float(int32_t(v[1])), float(int32_t(v[2])), float(int32_t(v[3]))}}; }
    Whole low_nibbles() const { return {v & 0x0f0f0f0fu}; }
    Whole high_nibbles() const { return {v >> 4 & 0x0f0f0f0fu}; }
    static Whole add_product(Whole a, Whole b, Whole c) { return {a.v + b.v * c.v}; }
    static Whole add_bytes(Whole a, Whole b) { return {a.v + b.v}; }  // of which none overflows
    int32_t sum() const { return int32_t(v[0] + v[1] + v[2] + v[3]); }
    static Whole dot_pairs(Whole acc, Whole a, Whole b) {
        for (int i = 0; i < 4; i++) acc.v[i] += uint32_t(int16_t(a.v[i]) * int16_t(b.v[i]) + int16_t(a.v[i] >> 16) * int16_t(b.v[i] >> 16));
        return acc;
    }
    static Whole dot(Whole acc, Whole u, Whole s) {
        uint8_t x[16];
        int8_t y[16];
        memcpy(x, &u.v, 16);
        memcpy(y, &s.v, 16);
        for (int i = 0; i < 4; i++)
            acc.v[i] += uint32_t(x[4 * i] * y[4 * i] + x[4 * i + 1] * y[4 * i + 1] + x[4 * i + 2] * y[4 * i + 2] + x[4 * i + 3] * y[4 * i + 3]);
        return acc;
    }
};

#endif

// exp by 2^n * polynomial (Cephes expf); 0 below -87, infinite above 88.
inline Vec exp(Vec x) {
    Vec low = Vec::all(-87.0f), high = Vec::all(88.0f);
    Vec c = Vec::min(high, Vec::max(low, x));  // in this order a NaN stays one on x86
    Vec n = Vec::round(c * Vec::all(1.44269504088896341f));
    Vec r = Vec::fma(n, Vec::all(-0.693359375f), c);
    r = Vec::fma(n, Vec::all(2.12194440e-4f), r);
    Vec p = Vec::all(1.9875691500e-4f);
    p = Vec::fma(p, r, Vec::all(1.3981999507e-3f));
    p = Vec::fma(p, r, Vec::all(8.3334519073e-3f));
    p = Vec::fma(p, r, Vec::all(4.1665795894e-2f));
    p = Vec::fma(p, r, Vec::all(1.6666665459e-1f));
    p = Vec::fma(p, r, Vec::all(5.0000001201e-1f));
    p = Vec::fma(p, r * r, r + Vec::all(1.0f));
    p = Vec::where_less(x, low, Vec::zero(), p * Vec::pow2(n));
    return Vec::where_less(high, x, Vec::all(__builtin_inff()), p);
}

inline Vec tanh(Vec x) {
    Vec one = Vec::all(1.0f);
    Vec limited = Vec::min(Vec::all(20.0f), Vec::max(Vec::all(-20.0f), x));
    return one - Vec::all(2.0f) / (exp(limited + limited) + one);
}

// x * P(X <= x) of a standard normal X (Hendrycks & Gimpel 2016); its tail by Abramowitz & Stegun 7.1.26, to 1.5e-7.
inline Vec gelu(Vec x) {
    const Vec size = Vec::max(x, Vec::zero() - x), y = size * Vec::all(0.70710678118654752f);
    const Vec t = Vec::all(1.0f) / Vec::fma(Vec::all(0.3275911f), y, Vec::all(1.0f));
    Vec p = Vec::all(1.061405429f);
    p = Vec::fma(p, t, Vec::all(-1.453152027f));
    p = Vec::fma(p, t, Vec::all(1.421413741f));
    p = Vec::fma(p, t, Vec::all(-0.284496736f));
    p = Vec::fma(p, t, Vec::all(0.254829592f));
    const Vec tail = p * t * exp(Vec::zero() - y * y);  // 1 - erf(y)
    return Vec::max(x, Vec::zero()) - Vec::all(0.5f) * size * tail;
}

inline Vec gelu_tanh(Vec x) {
    const Vec inner = Vec::all(0.79788456080286536f) * Vec::fma(Vec::all(0.044715f) * x, x * x, x);
    return Vec::all(0.5f) * x * (Vec::all(1.0f) + tanh(inner));
}

// x * sigmoid(x) (Elfwing et al. 2018).
inline Vec silu(Vec x) { return x / (Vec::all(1.0f) + exp(Vec::zero() - x)); }

// How a number format meets the matrix kernel.
struct F32 {
    using type = float;
    static constexpr int lane = 1;  // elements per 32-bit lane
    static Vec madd(Vec acc, Vec a, Vec b) { return Vec::madd_f32(acc, a, b); }
};
struct BF16 {
    using type = bf16;
    static constexpr int lane = 2;
    static Vec madd(Vec acc, Vec a, Vec b) { return Vec::madd_bf16(acc, a, b); }
};

}  // namespace inferd::INFERD_LEVEL
