/* What a simulated machine does to the process that this library is preloaded into: a disk that forgets what was not
 * synced, a disk that is full, and a wall clock that jumps. Driven by tests/chaos/machine.py, never used elsewhere.
 *
 * HUSHFLEET_DISK     the folder that is the machine's disk; only files directly in it are looked after
 * HUSHFLEET_DURABLE  what of it would survive a power cut: a copy of each synced file under its inode's number, a second
 *                    name for the inode (".live", so that its number is not given to another file), and "listing"
 * HUSHFLEET_CONTROL  a shared struct control, which the simulator writes at any time
 *
 * A file's bytes are durable once they were synced, and its name once the folder was, as POSIX has it.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

struct control {
    int64_t clock_ns; /* is added to the wall clock */
    int64_t full;     /* 1: no file of the disk can grow */
};

static char disk[PATH_MAX], durable[PATH_MAX - 64];
static size_t disk_length;
static volatile struct control *control;
static struct control calm;

#define REAL(name) static __typeof__(&name) real_##name
REAL(fsync); REAL(fdatasync); REAL(write); REAL(pwrite64); REAL(ftruncate64); REAL(clock_gettime);

static void find_real(void) {
#define FIND(name) real_##name = (__typeof__(real_##name))dlsym(RTLD_NEXT, #name)
    FIND(fsync); FIND(fdatasync); FIND(write); FIND(pwrite64); FIND(ftruncate64); FIND(clock_gettime);
}

#define READY() do { if (!control) begin(); } while (0)

__attribute__((constructor)) static void begin(void) {
    if (control) return;
    find_real();
    control = &calm;
    const char *folder = getenv("HUSHFLEET_DISK"), *kept = getenv("HUSHFLEET_DURABLE");
    const char *shared = getenv("HUSHFLEET_CONTROL");
    if (!folder || !kept || !shared || strlen(folder) >= sizeof disk || strlen(kept) >= sizeof durable) return;
    strcpy(durable, kept);
    strcpy(disk, folder);
    disk_length = strlen(disk);
    int fd = open(shared, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    void *mapped = mmap(NULL, sizeof calm, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (mapped != MAP_FAILED) control = mapped;
}

/* Whether the descriptor is the disk's folder (2), a file in it (1), or neither (0). */
static int on_disk(int fd) {
    char link[64], path[PATH_MAX];
    if (!disk_length || fd <= STDERR_FILENO) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < (ssize_t)disk_length || memcmp(path, disk, disk_length)) return 0;
    path[length] = 0;
    if (!path[disk_length]) return 2;
    return path[disk_length] == '/' && !strchr(path + disk_length + 1, '/');
}

static void save_file(int fd) {
    char name[PATH_MAX], link_name[64];
    static __thread char piece[1 << 16];
    struct stat state;
    if (fstat(fd, &state) || !state.st_nlink) return; /* without a name it cannot come back */
    snprintf(link_name, sizeof link_name, "/proc/self/fd/%d", fd);
    snprintf(name, sizeof name, "%s/%ju.live", durable, (uintmax_t)state.st_ino);
    linkat(AT_FDCWD, link_name, AT_FDCWD, name, AT_SYMLINK_FOLLOW);
    /* Not a second descriptor where it can be avoided: to close it would give up SQLite's locks on the file. */
    int from = fd;
    if ((fcntl(fd, F_GETFL) & O_ACCMODE) == O_WRONLY) from = open(link_name, O_RDONLY | O_CLOEXEC);
    snprintf(name, sizeof name, "%s/%ju", durable, (uintmax_t)state.st_ino);
    int to = open(name, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    off_t at = 0;
    for (ssize_t length; (length = pread(from, piece, sizeof piece, at)) > 0; at += length)
        if (pwrite(to, piece, length, at) != length) abort();
    if (to < 0 || from < 0 || ftruncate(to, at)) abort();
    close(to);
    if (from != fd) close(from);
}

static void save_folder(void) {
    char fresh[PATH_MAX], name[PATH_MAX], path[PATH_MAX + 256];
    snprintf(fresh, sizeof fresh, "%s/listing.%d", durable, (int)getpid());
    FILE *out = fopen(fresh, "we");
    DIR *folder = opendir(disk);
    if (!out || !folder) abort();
    for (struct dirent *each; (each = readdir(folder));) {
        struct stat state;
        snprintf(path, sizeof path, "%s/%s", disk, each->d_name);
        if (lstat(path, &state) || !S_ISREG(state.st_mode)) continue;
        snprintf(name, sizeof name, "%s/%ju.live", durable, (uintmax_t)state.st_ino);
        link(path, name);
        fprintf(out, "%ju %s\n", (uintmax_t)state.st_ino, each->d_name);
    }
    closedir(folder);
    if (fclose(out)) abort();
    snprintf(name, sizeof name, "%s/listing", durable);
    if (rename(fresh, name)) abort();
}

static int sync_it(int fd, int (*really)(int)) {
    int error = errno;
    switch (on_disk(fd)) {
        case 2: save_folder(); break;
        case 1: save_file(fd); break;
        default: return really(fd);
    }
    errno = error;
    return 0;
}

int fsync(int fd) { READY(); return sync_it(fd, real_fsync); }
int fdatasync(int fd) { READY(); return sync_it(fd, real_fdatasync); }

/* Whether a write up to byte `end` needs room that a full disk does not have; end -1: where the descriptor stands. */
static int no_room(int fd, off_t end, size_t length) {
    struct stat state;
    if (!control->full || on_disk(fd) != 1 || fstat(fd, &state)) return 0;
    if (end < 0) end = (fcntl(fd, F_GETFL) & O_APPEND ? state.st_size : lseek(fd, 0, SEEK_CUR)) + (off_t)length;
    return end > state.st_size;
}

#define REFUSE_IF_FULL(fd, end, length) \
    READY(); \
    if (no_room(fd, end, length)) { errno = ENOSPC; return -1; }

ssize_t write(int fd, const void *data, size_t length) {
    REFUSE_IF_FULL(fd, -1, length)
    return real_write(fd, data, length);
}

ssize_t pwrite64(int fd, const void *data, size_t length, off64_t at) {
    REFUSE_IF_FULL(fd, at + (off_t)length, 0)
    return real_pwrite64(fd, data, length, at);
}

ssize_t pwrite(int fd, const void *data, size_t length, off_t at) { return pwrite64(fd, data, length, at); }

int ftruncate64(int fd, off64_t size) {
    REFUSE_IF_FULL(fd, size, 0)
    return real_ftruncate64(fd, size);
}

int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

int clock_gettime(clockid_t clock, struct timespec *now) {
    READY();
    int result = real_clock_gettime(clock, now);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t shift = control->clock_ns, nanoseconds = now->tv_nsec + shift % 1000000000;
        now->tv_sec += shift / 1000000000;
        if (nanoseconds < 0) { nanoseconds += 1000000000; now->tv_sec--; }
        if (nanoseconds >= 1000000000) { nanoseconds -= 1000000000; now->tv_sec++; }
        now->tv_nsec = nanoseconds;
    }
    return result;
}
