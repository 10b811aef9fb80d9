/* The loops over one block, compiled once for each level of vector instructions; kernel.c includes this file and says

   TARGET, NAMED(x)     attribute that names the instructions, and x with the suffix of the level
   BYTES                of a vector; F32, F64, U32, U64 are vectors of that size, S32 one with half as many floats
   MIN32 and so on      the lower or higher of two vectors, lane by lane
   WIDE_LOW, WIDE_HIGH  the first and second half of the floats as doubles
   FUSED(a, b, c)       a * b + c
   U16(p)               as many 16-bit elements as there are floats, as 32-bit ones
*/

/* The fast pass over a block: sums and sums of squares in double, the ends, the least magnitude. It is right where all
   is finite and the mean is not far larger than the deviation; where it is not, slow passes follow. */
#define FAST_FLOATS(NAME, RAW, LOAD)                                                                                 \
    TARGET static int64_t NAMED(NAME)(const RAW *x, int64_t n, fast *out)                                            \
    {                                                                                                                \
        enum { LANES = BYTES / 4 };                                                                                  \
        const int64_t whole = n - n % LANES;                                                                         \
        F64 sum0 = {0}, sum1 = {0}, squares0 = {0}, squares1 = {0};                                                  \
        F32 low = (F32){0} + INFINITY, high = (F32){0} - INFINITY;                                                   \
        U32 least = (U32){0} + 0x7fffffffu;                                                                          \
        for (int64_t i = 0; i < whole; i += LANES) {                                                                 \
            F32 v;                                                                                                   \
            LOAD                                                                                                     \
            low = MIN32(low, v);                                                                                     \
            high = MAX32(high, v);                                                                                   \
            least = MINU32(least, (U32)v & 0x7fffffffu);                                                             \
            const F64 a = WIDE_LOW(v), b = WIDE_HIGH(v);                                                             \
            sum0 += a;                                                                                               \
            sum1 += b;                                                                                               \
            squares0 = FUSED(a, a, squares0);                                                                        \
            squares1 = FUSED(b, b, squares1);                                                                        \
        }                                                                                                            \
        *out = (fast){.low = INFINITY, .high = -INFINITY, .least = UINT64_MAX};                                      \
        for (int l = 0; l < LANES / 2; ++l) {                                                                        \
            out->sum += sum0[l] + sum1[l];                                                                           \
            out->squares += squares0[l] + squares1[l];                                                               \
        }                                                                                                            \
        for (int l = 0; l < LANES; ++l) {                                                                            \
            out->low = low[l] < out->low ? low[l] : out->low;                                                        \
            out->high = high[l] > out->high ? high[l] : out->high;                                                   \
            out->least = least[l] < out->least ? least[l] : out->least;                                              \
        }                                                                                                            \
        return whole;                                                                                                \
    }

#define LOAD_F32 memcpy(&v, x + i, sizeof v);
#define LOAD_BF16 v = (F32)(U16(x + i) << 16);

/* A normal half is moved to the exponents of a float; a subnormal one is made a normal float, from which its hidden one
   is taken away. */
#define LOAD_F16                                                                                                     \
    {                                                                                                                \
        const U32 half = U16(x + i), bits = (half & 0x7fff) << 13;                                                   \
        const U32 tiny = (U32)(bits < 0x800000);                                                                     \
        const F32 normal = (F32)(bits + (112u << 23)), little = (F32)(bits + (113u << 23)) - 0x1p-14f;               \
        const U32 top = (U32)(bits >= 0xf800000u) & 0x7f800000u;                                                     \
        v = (F32)((((U32)little & tiny) | ((U32)normal & ~tiny)) | top | (half & 0x8000) << 16);                     \
    }

FAST_FLOATS(fast_f32, uint32_t, LOAD_F32)
FAST_FLOATS(fast_bf16, uint16_t, LOAD_BF16)
FAST_FLOATS(fast_f16, uint16_t, LOAD_F16)

TARGET static int64_t NAMED(fast_f64)(const uint64_t *x, int64_t n, fast *out)
{
    enum { LANES = BYTES / 8 };
    const int64_t whole = n - n % (2 * LANES);
    F64 sum0 = {0}, sum1 = {0}, squares0 = {0}, squares1 = {0};
    F64 low = (F64){0} + INFINITY, high = (F64){0} - INFINITY;
    F64 least = (F64){0} + INFINITY;
    for (int64_t i = 0; i < whole; i += 2 * LANES) {
        F64 a, b;
        memcpy(&a, x + i, sizeof a);
        memcpy(&b, x + i + LANES, sizeof b);
        low = MIN64(low, MIN64(a, b));
        high = MAX64(high, MAX64(a, b));
        least = MIN64(least, MIN64((F64)((U64)a & 0x7fffffffffffffffu), (F64)((U64)b & 0x7fffffffffffffffu)));
        sum0 += a;
        sum1 += b;
        squares0 = FUSED(a, a, squares0);
        squares1 = FUSED(b, b, squares1);
    }
    *out = (fast){.low = INFINITY, .high = -INFINITY, .least = UINT64_MAX};
    for (int l = 0; l < LANES; ++l) {
        out->sum += sum0[l] + sum1[l];
        out->squares += squares0[l] + squares1[l];
        out->low = low[l] < out->low ? low[l] : out->low;
        out->high = high[l] > out->high ? high[l] : out->high;
        uint64_t bits;
        const double one = least[l];
        memcpy(&bits, &one, sizeof bits);
        out->least = bits < out->least ? bits : out->least;
    }
    return whole;
}

/* A block: the fast pass, and what it could not do. MAGNITUDE is the mask of all but the sign, INFINITE the magnitude of
   infinity, SMALLEST that of the smallest normal number, LEAST the same in what the fast pass compares. */
#define REAL_BLOCK(NAME, RAW, FAST, ONE, MAGNITUDE, INFINITE, SMALLEST, LEAST)                                       \
    TARGET static void NAMED(NAME)(const void *memory, int64_t n, part *out)                                         \
    {                                                                                                                \
        const RAW *x = memory;                                                                                       \
        fast found;                                                                                                  \
        int64_t rest = NAMED(FAST)(x, n, &found), first = -1;                                                        \
        *out = (part){.low = found.low, .high = found.high, .finite = rest};                                         \
        double sum = found.sum, squares = found.squares, shift = 0;                                                  \
        if (found.least < LEAST && squares - squares == 0)                                                           \
            for (int64_t start = 0; start < rest; start += 1024) {                                                   \
                const int64_t end = start + 1024 < rest ? start + 1024 : rest;                                       \
                RAW zeros = 0, small = 0; /* as wide as the elements, so that all are counted at once */             \
                for (int64_t i = start; i < end; ++i) {                                                              \
                    zeros += (x[i] & MAGNITUDE) == 0;                                                                \
                    small += (x[i] & MAGNITUDE) < SMALLEST;                                                          \
                }                                                                                                    \
                out->zeros += zeros;                                                                                 \
                out->small += small;                                                                                 \
            }                                                                                                        \
        for (;;) {                                                                                                   \
            SLOW_PASS(RAW, ONE, MAGNITUDE, INFINITE, SMALLEST)                                                       \
            const double far = sum * (sum / (double)(out->finite ? out->finite : 1));                                \
            if (first >= 0 || (squares - squares == 0 && far <= FAR * (squares - far)))                              \
                break;                                                                                               \
            *out = (part){.low = INFINITY, .high = -INFINITY}; /* all of it again, around one of the elements */     \
            sum = squares = 0;                                                                                       \
            rest = first = 0;                                                                                        \
            while (first < n && (x[first] & MAGNITUDE) >= INFINITE)                                                  \
                ++first;                                                                                             \
            shift = first < n ? ONE(x[first]) : 0;                                                                   \
        }                                                                                                            \
        moments(out, shift, sum, squares);                                                                           \
    }

/* Eight sums, so that the compiler can work on several elements at once. */
#define SLOW_PASS(RAW, ONE, MAGNITUDE, INFINITE, SMALLEST)                                                           \
    double sums[8] = {0}, many[8] = {0};                                                                             \
    double low = out->low, high = out->high;                                                                         \
    for (int64_t i = rest; i < n; ++i) {                                                                             \
        const RAW magnitude = x[i] & MAGNITUDE;                                                                      \
        const int is_finite = magnitude < INFINITE;                                                                  \
        const double value = ONE(is_finite ? x[i] : 0), away = is_finite ? value - shift : 0;                        \
        sums[i & 7] += away;                                                                                         \
        many[i & 7] += away * away;                                                                                  \
        low = is_finite && value < low ? value : low;                                                                \
        high = is_finite && value > high ? value : high;                                                             \
        out->finite += is_finite;                                                                                    \
        out->nan += magnitude > INFINITE;                                                                            \
        out->positive += x[i] == INFINITE;                                                                           \
        out->negative += magnitude == INFINITE && x[i] != INFINITE;                                                  \
        out->zeros += magnitude == 0;                                                                                \
        out->small += magnitude < SMALLEST;                                                                          \
    }                                                                                                                \
    for (int l = 0; l < 8; ++l) {                                                                                    \
        sum += sums[l];                                                                                              \
        squares += many[l];                                                                                          \
    }                                                                                                                \
    out->low = low;                                                                                                  \
    out->high = high;

REAL_BLOCK(block_f32, uint32_t, fast_f32, f32_one, 0x7fffffffu, 0x7f800000u, 0x00800000u, 0x00800000u)
REAL_BLOCK(block_f64, uint64_t, fast_f64, f64_one, 0x7fffffffffffffffu, 0x7ff0000000000000u, 0x0010000000000000u,
    0x0010000000000000u)
REAL_BLOCK(block_bf16, uint16_t, fast_bf16, bf16_one, 0x7fffu, 0x7f80u, 0x0080u, 0x00800000u)
REAL_BLOCK(block_f16, uint16_t, fast_f16, f16_one, 0x7fffu, 0x7c00u, 0x0400u, 0x38800000u)

#define WHOLE_BLOCK(NAME, TYPE)                                                                                      \
    TARGET static void NAMED(NAME)(const void *memory, int64_t n, part *out)                                         \
    {                                                                                                                \
        const TYPE *x = memory;                                                                                      \
        const double shift = n ? (double)x[0] : 0;                                                                   \
        double sum[8] = {0}, squares[8] = {0};                                                                       \
        TYPE low = n ? x[0] : 0, high = low;                                                                         \
        int64_t zeros = 0;                                                                                           \
        for (int64_t i = 0; i < n; ++i) {                                                                            \
            const double away = (double)x[i] - shift;                                                                \
            sum[i & 7] += away;                                                                                      \
            squares[i & 7] += away * away;                                                                           \
            low = x[i] < low ? x[i] : low;                                                                           \
            high = x[i] > high ? x[i] : high;                                                                        \
            zeros += x[i] == 0;                                                                                      \
        }                                                                                                            \
        *out = (part){.finite = n, .zeros = zeros, .small = zeros, .low = low, .high = high};                        \
        for (int l = 1; l < 8; ++l) {                                                                                \
            sum[0] += sum[l];                                                                                        \
            squares[0] += squares[l];                                                                                \
        }                                                                                                            \
        moments(out, shift, sum[0], squares[0]);                                                                     \
    }

WHOLE_BLOCK(block_i16, int16_t)
WHOLE_BLOCK(block_u16, uint16_t)
WHOLE_BLOCK(block_i32, int32_t)
WHOLE_BLOCK(block_u32, uint32_t)
WHOLE_BLOCK(block_i64, int64_t)
WHOLE_BLOCK(block_u64, uint64_t)

static const block_function NAMED(blocks)[] = {
    NAMED(block_f32), NAMED(block_f64), NAMED(block_bf16), NAMED(block_f16), NAMED(block_i16), NAMED(block_u16),
    NAMED(block_i32), NAMED(block_u32), NAMED(block_i64), NAMED(block_u64),
};

#undef FAST_FLOATS
#undef LOAD_F32
#undef LOAD_BF16
#undef LOAD_F16
#undef REAL_BLOCK
#undef SLOW_PASS
#undef WHOLE_BLOCK
#undef TARGET
#undef NAMED
#undef BYTES
#undef F32
#undef F64
#undef U32
#undef U64
#undef MIN32
#undef MAX32
#undef MINU32
#undef MIN64
#undef MAX64
#undef WIDE_LOW
#undef WIDE_HIGH
#undef FUSED
#undef U16
