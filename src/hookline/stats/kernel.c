/* Statistics of one tensor in one read of its memory. Plain C, called through ctypes on raw pointers.

   A tensor is read in blocks of BLOCK elements. Each gives its moments around one of its own elements, in double, and
   the blocks are merged in their order by the parallel formula of Chan, Golub and LeVeque (1979): what comes out does
   not depend on the number of threads. Values that are not finite are counted and left out of the moments. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define BLOCK 32768

#define VECTORS(BYTES)                                                                                               \
    typedef float f32x##BYTES __attribute__((vector_size(BYTES)));                                                   \
    typedef double f64x##BYTES __attribute__((vector_size(BYTES)));                                                  \
    typedef uint16_t u16x##BYTES __attribute__((vector_size(BYTES)));                                                \
    typedef uint32_t u32x##BYTES __attribute__((vector_size(BYTES)));                                                \
    typedef uint64_t u64x##BYTES __attribute__((vector_size(BYTES)));

/* What a block gives; small counts zeros and subnormals. */
typedef struct {
    double mean, spread, low, high;
    int64_t finite, nan, positive, negative, zeros, small;
} part;

/* What the fast pass gives: least is the bits of the least magnitude. */
typedef struct {
    double sum, squares, low, high;
    uint64_t least;
} fast;

#define FAR 1e4 /* square of the mean by the variance from which on the moments are computed around an element */

typedef void (*block_function)(const void *, int64_t, part *);

static inline float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float f32_one(uint32_t raw) { return float_of(raw); }

static inline double f64_one(uint64_t raw)
{
    double value;
    memcpy(&value, &raw, sizeof value);
    return value;
}

static inline float bf16_one(uint16_t raw) { return float_of((uint32_t)raw << 16); }

static inline float f16_one(uint16_t raw)
{
    const uint32_t bits = (raw & 0x7fffu) << 13, sign = (raw & 0x8000u) << 16;
    const float value = bits < 0x800000 ? float_of(bits + (113u << 23)) - 0x1p-14f : float_of(bits + (112u << 23));
    return sign ? -value : value;
}

static inline void moments(part *out, double shift, double sum, double squares)
{
    if (!out->finite)
        return;
    const double mean = sum / (double)out->finite, spread = squares - sum * mean;
    out->mean = shift + mean;
    out->spread = spread > 0 ? spread : 0;
}

#if defined(__x86_64__)
#include <immintrin.h>

VECTORS(64)
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#define NAMED(x) x##_avx512
#define BYTES 64
#define F32 f32x64
#define F64 f64x64
#define U32 u32x64
#define U64 u64x64
#define MIN32(a, b) ((F32)_mm512_min_ps((__m512)(a), (__m512)(b)))
#define MAX32(a, b) ((F32)_mm512_max_ps((__m512)(a), (__m512)(b)))
#define MINU32(a, b) ((U32)_mm512_min_epu32((__m512i)(a), (__m512i)(b)))
#define MIN64(a, b) ((F64)_mm512_min_pd((__m512d)(a), (__m512d)(b)))
#define MAX64(a, b) ((F64)_mm512_max_pd((__m512d)(a), (__m512d)(b)))
#define WIDE_LOW(v) ((F64)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)(v))))
#define WIDE_HIGH(v) ((F64)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)(v), 1)))
#define FUSED(a, b, c) ((F64)_mm512_fmadd_pd((__m512d)(a), (__m512d)(b), (__m512d)(c)))
#define U16(p) ((U32)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p))))
#include "kernel_block.h"

VECTORS(32)
#define TARGET __attribute__((target("avx2,fma")))
#define NAMED(x) x##_avx2
#define BYTES 32
#define F32 f32x32
#define F64 f64x32
#define U32 u32x32
#define U64 u64x32
#define MIN32(a, b) ((F32)_mm256_min_ps((__m256)(a), (__m256)(b)))
#define MAX32(a, b) ((F32)_mm256_max_ps((__m256)(a), (__m256)(b)))
#define MINU32(a, b) ((U32)_mm256_min_epu32((__m256i)(a), (__m256i)(b)))
#define MIN64(a, b) ((F64)_mm256_min_pd((__m256d)(a), (__m256d)(b)))
#define MAX64(a, b) ((F64)_mm256_max_pd((__m256d)(a), (__m256d)(b)))
#define WIDE_LOW(v) ((F64)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)(v))))
#define WIDE_HIGH(v) ((F64)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)(v), 1)))
#define FUSED(a, b, c) ((F64)_mm256_fmadd_pd((__m256d)(a), (__m256d)(b), (__m256d)(c)))
#define U16(p) ((U32)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p))))
#include "kernel_block.h"
#endif

/* What every machine has: NEON on arm64, SSE2 on x86-64. */
VECTORS(16)

static inline f64x16 widened(float a, float b) { return (f64x16){a, b}; }

static inline u32x16 sixteen_bits(const uint16_t *p) { return (u32x16){p[0], p[1], p[2], p[3]}; }

#define BLEND(T, U, mask, a, b) ((T)(((U)(a) & (U)(mask)) | ((U)(b) & ~(U)(mask))))
#define TARGET
#define NAMED(x) x##_plain
#define BYTES 16
#define F32 f32x16
#define F64 f64x16
#define U32 u32x16
#define U64 u64x16
#define MIN32(a, b) BLEND(F32, U32, (a) < (b), a, b)
#define MAX32(a, b) BLEND(F32, U32, (a) > (b), a, b)
#define MINU32(a, b) BLEND(U32, U32, (a) < (b), a, b)
#define MIN64(a, b) BLEND(F64, U64, (a) < (b), a, b)
#define MAX64(a, b) BLEND(F64, U64, (a) > (b), a, b)
#define WIDE_LOW(v) widened((v)[0], (v)[1])
#define WIDE_HIGH(v) widened((v)[2], (v)[3])
#define FUSED(a, b, c) ((a) * (b) + (c))
#define U16(p) sixteen_bits(p)
#include "kernel_block.h"

/* 0 is plain; how many levels this machine has. */
EXPORT int hookline_levels(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    const int has2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const int has512 = has2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return 1 + !!has2 + !!has512;
#else
    return 1;
#endif
}

static block_function block_of(int kind, int level)
{
#if defined(__x86_64__)
    if (level == 2)
        return blocks_avx512[kind];
    if (level == 1)
        return blocks_avx2[kind];
#endif
    (void)level;
    return blocks_plain[kind];
}

static const int widths[] = {4, 8, 2, 2, 2, 2, 4, 4, 8, 8};

/* ---------------------------------------------------------------- one byte: counted by value */

#define FIRST_OF_BYTES 16 /* the first kind of one byte, whose values come in a table */

static void count_bytes(const uint8_t *x, int64_t n, int64_t *counts)
{
    uint32_t four[4][256] = {{0}};
    for (int64_t start = 0; start < n; start += 1 << 30) {
        const int64_t end = n < start + (1 << 30) ? n : start + (1 << 30);
        int64_t i = start;
        for (; i + 4 <= end; i += 4)
            for (int j = 0; j < 4; ++j)
                ++four[j][x[i + j]];
        for (; i < end; ++i)
            ++four[0][x[i]];
        for (int j = 0; j < 4; ++j)
            for (int value = 0; value < 256; ++value)
                counts[value] += four[j][value];
        memset(four, 0, sizeof four);
    }
}

static void part_of_counts(const int64_t *counts, const double *table, double smallest, part *out)
{
    *out = (part){.low = INFINITY, .high = -INFINITY};
    double sum = 0, squares = 0, mean = 0;
    for (int value = 0; value < 256; ++value) {
        const int64_t count = counts[value];
        const double x = table[value];
        if (!count)
            continue;
        if (x != x)
            out->nan += count;
        else if (isinf(x))
            *(x > 0 ? &out->positive : &out->negative) += count;
        else {
            sum += (double)count * x;
            out->finite += count;
            out->zeros += x == 0 ? count : 0;
            out->small += x == 0 || fabs(x) < smallest ? count : 0;
            out->low = x < out->low ? x : out->low;
            out->high = x > out->high ? x : out->high;
        }
    }
    mean = out->finite ? sum / (double)out->finite : 0;
    sum = 0;
    for (int value = 0; value < 256; ++value)
        if (counts[value] && table[value] - table[value] == 0) { /* again, around the mean */
            const double away = table[value] - mean;
            sum += (double)counts[value] * away;
            squares += (double)counts[value] * (away * away);
        }
    moments(out, mean, sum, squares);
}

/* ---------------------------------------------------------------- a whole tensor */

/* A thread may be told to take subnormal numbers for zero (torch.set_flush_denormal): not while we look at them. */
#if defined(__x86_64__)
static inline unsigned exact(void)
{
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before & ~0x8040u);
    return before;
}
static inline void as_before(unsigned state) { _mm_setcsr(state); }
#else
static inline unsigned exact(void) { return 0; }
static inline void as_before(unsigned state) { (void)state; }
#endif

typedef void (*parallel_function)(void (*)(void *), void *, unsigned, unsigned);

typedef struct {
    const char *memory;
    int64_t n, next, step;
    int width;
    block_function block;
    part *parts;
} job;

static void work(void *argument)
{
    job *const all = argument;
    const int64_t blocks = (all->n + BLOCK - 1) / BLOCK;
    const unsigned state = exact();
    for (;;) {
        const int64_t first = __atomic_fetch_add(&all->next, all->step, __ATOMIC_RELAXED);
        if (first >= blocks)
            break;
        const int64_t last = first + all->step < blocks ? first + all->step : blocks;
        for (int64_t i = first; i < last; ++i) {
            const int64_t start = i * BLOCK, rest = all->n - start;
            all->block(all->memory + start * all->width, rest < BLOCK ? rest : BLOCK, all->parts + i);
        }
    }
    as_before(state);
}

static void join(part *all, const part *one)
{
    all->nan += one->nan;
    all->positive += one->positive;
    all->negative += one->negative;
    if (!one->finite)
        return;
    if (!all->finite) {
        const int64_t nan = all->nan, positive = all->positive, negative = all->negative;
        *all = *one;
        all->nan = nan;
        all->positive = positive;
        all->negative = negative;
        return;
    }
    const double before = (double)all->finite, more = (double)one->finite, total = before + more;
    const double delta = one->mean - all->mean;
    all->mean += delta * (more / total);
    all->spread += one->spread + delta * delta * (before * (more / total));
    all->finite += one->finite;
    all->zeros += one->zeros;
    all->small += one->small;
    all->low = one->low < all->low ? one->low : all->low;
    all->high = one->high > all->high ? one->high : all->high;
}

/* numel, mean, std, min, max, l2, nan, inf, neg_inf, zeros, subnormal */
static void write_row(const part *all, int64_t n, double *row)
{
    row[0] = (double)n;
    if (all->finite) {
        double mean = all->mean < all->low ? all->low : all->mean;
        mean = mean > all->high ? all->high : mean;
        row[1] = mean;
        row[2] = sqrt(all->spread / (double)all->finite);
        row[3] = all->low + 0.0;
        row[4] = all->high + 0.0;
        row[5] = sqrt(all->spread + (double)all->finite * (mean * mean));
    } else
        row[1] = row[2] = row[3] = row[4] = row[5] = NAN;
    row[6] = (double)all->nan;
    row[7] = (double)(all->positive + all->negative);
    row[8] = (double)all->negative;
    row[9] = (double)all->zeros;
    row[10] = (double)(all->small - all->zeros);
}

static int summarize(const void *memory, int64_t n, int kind, const double *table, double smallest, double *row,
    int level, int threads, parallel_function parallel)
{
    part all = {0};
    if (kind >= FIRST_OF_BYTES) {
        int64_t counts[256] = {0};
        count_bytes(memory, n, counts);
        part_of_counts(counts, table, smallest, &all);
        write_row(&all, n, row);
        return 0;
    }
    const block_function block = block_of(kind, level);
    if (n <= BLOCK) {
        if (n)
            block(memory, n, &all);
        write_row(&all, n, row);
        return 0;
    }
    const int64_t blocks = (n + BLOCK - 1) / BLOCK;
    part *const parts = malloc((size_t)blocks * sizeof *parts);
    if (!parts)
        return 1;
    const int64_t step = blocks / (threads * 8) > 0 ? blocks / (threads * 8) : 1;
    job some = {.memory = memory, .n = n, .step = step > 16 ? 16 : step, .width = widths[kind], .block = block,
        .parts = parts};
    if (threads > 1 && parallel)
        parallel(work, &some, (unsigned)threads, 0);
    else
        work(&some);
    for (int64_t i = 0; i < blocks; ++i)
        join(&all, parts + i);
    free(parts);
    write_row(&all, n, row);
    return 0;
}

/* Returns 0, or 1 where there is no memory for the parts. */
EXPORT int hookline_summarize(const void *memory, int64_t n, int kind, const double *table, double smallest, double *row,
    int level, int threads, parallel_function parallel)
{
    const unsigned state = exact();
    const int failed = summarize(memory, n, kind, table, smallest, row, level, threads, parallel);
    as_before(state);
    return failed;
}

/* Many small tensors of at most BLOCK elements. */
EXPORT void hookline_summarize_many(const uint64_t *addresses, const int64_t *sizes, int64_t count, int kind,
    const double *table, double smallest, double *rows, int level)
{
    for (int64_t i = 0; i < count; ++i)
        hookline_summarize((const void *)(uintptr_t)addresses[i], sizes[i], kind, table, smallest, rows + 11 * i, level,
            1, NULL);
}
