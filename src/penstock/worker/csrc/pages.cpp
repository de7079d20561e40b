// Reads files of one page each and computes their checksums without the GIL, for `worker/movers.py`.

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <sys/uio.h>
#include <unistd.h>

namespace {

constexpr int64_t kLine = 4096;
constexpr int64_t kWords = kLine / 8;
constexpr int64_t kChunk = 64 * kLine;  // Summed while it is still in a core's own cache.

using Word = uint64_t __attribute__((aligned(1), may_alias));

// Adds whole lines: each to its own sum, and word by word to the column sums, modulo 2^64.
void add(const uint8_t* bytes, int64_t lines, uint64_t* line_sums, uint64_t* column_sums) {
    for (int64_t line = 0; line < lines; ++line) {
        const Word* words = reinterpret_cast<const Word*>(bytes + line * kLine);
        uint64_t sum = 0;
        for (int64_t i = 0; i < kWords; ++i) {
            sum += words[i];
            column_sums[i] += words[i];
        }
        line_sums[line] = sum;
    }
}

// Fills both parts as far as the file has bytes. Returns the number of bytes read, or -errno.
int64_t fill(int file, uint8_t* head, int64_t head_bytes, uint8_t* body, int64_t body_bytes) {
    int64_t done = 0;
    while (done < head_bytes + body_bytes) {
        iovec parts[2] = {{head + done, static_cast<size_t>(head_bytes - done)}, {body, static_cast<size_t>(body_bytes)}};
        if (done >= head_bytes) parts[1] = {body + (done - head_bytes), static_cast<size_t>(head_bytes + body_bytes - done)};
        const ssize_t got = done < head_bytes ? readv(file, parts, 2) : readv(file, parts + 1, 1);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return -errno;
        if (got == 0) break;
        done += got;
    }
    return done;
}

// Opens a file for reading. Refuses symbolic links, also as its folder, and does not wait if it is a pipe.
// Returns a descriptor, or -errno.
int open_page(const char* path) {
    const char* slash = strrchr(path, '/');
    if (slash == nullptr) return -EINVAL;
    const std::string folder(path, slash);
    const int at = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (at < 0) return -errno;
    const int file = openat(at, slash + 1, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    const int error = errno;
    close(at);
    return file < 0 ? -error : file;
}

// Reads one file: its header and page, and the page's sums. Returns the number of bytes, or -errno.
int64_t read_page(const char* path, uint8_t* head, int64_t head_bytes, uint8_t* page, int64_t page_bytes, uint64_t* line_sums,
                  uint64_t* column_sums) {
    const int file = open_page(path);
    if (file < 0) return file;
    int64_t done = 0, at = 0;
    for (int64_t i = 0; i < kWords; ++i) column_sums[i] = 0;
    do {
        const int64_t size = page_bytes - at < kChunk ? page_bytes - at : kChunk;
        const int64_t wanted = size + (at ? 0 : head_bytes);
        const int64_t got = at ? fill(file, nullptr, 0, page + at, size) : fill(file, head, head_bytes, page, size);
        if (got < 0) {
            close(file);
            return got;
        }
        done += got;
        if (got < wanted) break;
        add(page + at, size / kLine, line_sums + at / kLine, column_sums);
        at += size;
    } while (at < page_bytes);
    close(file);
    return done;
}

}  // namespace

// `count` files, one after another. Headers go one behind the other to `heads`, pages of `sizes` bytes to `pages`; to `sums`,
// for each page, the sums of its whole lines and then of its columns; to `found`, how many bytes there were, or -errno.
extern "C" __attribute__((visibility("default"))) void penstock_read_pages(
    int64_t count, const char* const* paths, int64_t head_bytes, uint8_t* heads, const int64_t* sizes, uint8_t* pages,
    uint64_t* sums, int64_t* found) {
    for (int64_t i = 0; i < count; ++i) {
        const int64_t lines = sizes[i] / kLine;
        found[i] = read_page(paths[i], heads, head_bytes, pages, sizes[i], sums, sums + lines);
        heads += head_bytes;
        pages += sizes[i];
        sums += lines + kWords;
    }
}
