/* A disk that fails: preloaded into a process, it lets calls on files below one folder fail, wait, or do half.

   Nothing happens until `failing_disk_aim` is called, by a process that was forked or started for one attack. Calls are
   counted by their kind, so that every position can be aimed at. Linux with glibc. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* In the order of `KINDS` in failing_disk.py. */
enum { OPEN, READ, WRITE, SYNC, RENAME, REMOVE, MAKE_FOLDER, REMOVE_FOLDER, LINK, LOOK, LIST, CUT, MAP, CREATE };

/* What happens to a call that is struck. */
enum { FAIL, WAIT, SHORT, QUOTA };

enum { DESCRIPTORS = 65536, CALLS = 1 << 18 };

static char folder[PATH_MAX];
static size_t folder_length;
static unsigned mask;
static long at, times, value;
static int code, mode, without_sync;
static atomic_long counted, struck, written;
static unsigned char kinds[CALLS];
static char where[PATH_MAX + 32];
static atomic_uchar below[DESCRIPTORS];

#define NAMES(X) X(openat64) X(read) X(pread64) X(readv) X(write) X(pwrite64) X(writev) X(fsync) X(fdatasync) \
    X(rename) X(renameat) X(renameat2) X(unlink) X(unlinkat) X(mkdir) X(mkdirat) X(rmdir) X(link) X(linkat) X(stat64) \
    X(lstat64) X(fstat64) X(fstatat64) X(statx) X(opendir) X(fdopendir) X(readdir64) X(ftruncate64) X(truncate64) \
    X(mmap64) X(close) X(closedir) X(clock_gettime)
#define DECLARE(name) static void *real_##name;
NAMES(DECLARE)

/* Looked up at the first call: libraries that are set up before this one may call already. */
static void *next_of(void **function, const char *name) {
    if (!*function) *function = dlsym(RTLD_NEXT, name);
    return *function;
}
#define REAL(type, name) ((type)next_of(&real_##name, #name))

/* Aim: let calls of the kinds in `which`, from the one of number `from` on, `many` times (below 0: for good), fail with
   `error`, or do otherwise as `what` says: wait `amount` microseconds, write half, or fail once `amount` bytes have been
   written. */
void failing_disk_aim(const char *path, unsigned which, long from, long many, int error, int what, long amount) {
    folder_length = 0;
    mask = which, at = from, times = many, code = error, mode = what, value = amount;
    counted = struck = written = 0;
    where[0] = 0;
    snprintf(folder, sizeof folder, "%s", path);
    folder_length = strlen(folder);
}

void failing_disk_without_sync(int on) { without_sync = on; }
long failing_disk_counted(void) { return counted; }
long failing_disk_struck(void) { return struck; }
const char *failing_disk_where(void) { return where; }
long failing_disk_kinds(unsigned char *into, long room) {
    long number = counted < CALLS ? counted : CALLS;
    if (number > room) number = room;
    memcpy(into, kinds, number);
    return number;
}

static int is_below(int at_descriptor, const char *path) {
    if (!folder_length || !path) return 0;
    if (path[0] != '/' && at_descriptor != AT_FDCWD)
        return at_descriptor >= 0 && at_descriptor < DESCRIPTORS && below[at_descriptor];
    return !strncmp(path, folder, folder_length) && (path[folder_length] == '/' || !path[folder_length]);
}

static int is_watched(int descriptor) {
    return folder_length && descriptor >= 0 && descriptor < DESCRIPTORS && below[descriptor];
}

/* Count a call and say what is to become of it: 0 lets it pass, above 0 is an error, -1 asks for half. */
static int strike(int kind, const char *path, int descriptor, long bytes) {
    if (!(mask & (1u << kind))) return 0;
    long number = atomic_fetch_add(&counted, 1) + 1;
    if (number <= CALLS) kinds[number - 1] = kind;
    if (number < at || (times >= 0 && number >= at + times)) return 0;
    if (mode == WAIT) {
        usleep(value);
        return 0;
    }
    if (mode == QUOTA && atomic_fetch_add(&written, bytes) + bytes <= value) return 0;
    if (atomic_fetch_add(&struck, 1) == 0) {
        char link[64], found[PATH_MAX] = "";
        if (!path) {
            snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
            ssize_t length = readlink(link, found, sizeof found - 1);
            found[length < 0 ? 0 : length] = 0;
            path = found;
        }
        snprintf(where, sizeof where, "%d %s", kind, path);
    }
    return mode == SHORT ? -1 : code;
}

#define FAIL_AT(kind, at_descriptor, path, failed)                                                                        \
    if (is_below(at_descriptor, path)) {                                                                                  \
        int error = strike(kind, path, -1, 0);                                                                            \
        if (error > 0) {                                                                                                  \
            errno = error;                                                                                                \
            return failed;                                                                                                \
        }                                                                                                                 \
    }
#define FAIL_ON(kind, descriptor, failed)                                                                                 \
    if (is_watched(descriptor)) {                                                                                         \
        int error = strike(kind, 0, descriptor, 0);                                                                       \
        if (error > 0) {                                                                                                  \
            errno = error;                                                                                                \
            return failed;                                                                                                \
        }                                                                                                                 \
    }

static int opened(int descriptor, int is_ours) {
    if (descriptor >= 0 && descriptor < DESCRIPTORS) below[descriptor] = is_ours;
    return descriptor;
}

static int open_at(int at_descriptor, const char *path, int flags, mode_t rights) {
    int ours = is_below(at_descriptor, path);
    FAIL_AT(flags & O_CREAT ? CREATE : OPEN, at_descriptor, path, -1)
    return opened(REAL(int (*)(int, const char *, int, ...), openat64)(at_descriptor, path, flags, rights), ours);
}

#define RIGHTS                                                                                                            \
    mode_t rights = 0;                                                                                                    \
    if (flags & (O_CREAT | O_TMPFILE)) {                                                                                  \
        va_list more;                                                                                                     \
        va_start(more, flags);                                                                                            \
        rights = va_arg(more, mode_t);                                                                                    \
        va_end(more);                                                                                                     \
    }
int open(const char *path, int flags, ...) { RIGHTS return open_at(AT_FDCWD, path, flags, rights); }
int open64(const char *path, int flags, ...) { RIGHTS return open_at(AT_FDCWD, path, flags, rights); }
int openat(int base, const char *path, int flags, ...) { RIGHTS return open_at(base, path, flags, rights); }
int openat64(int base, const char *path, int flags, ...) { RIGHTS return open_at(base, path, flags, rights); }

int close(int descriptor) {
    if (descriptor >= 0 && descriptor < DESCRIPTORS) below[descriptor] = 0;
    return REAL(int (*)(int), close)(descriptor);
}

int closedir(DIR *from) {
    int descriptor = dirfd(from);
    if (descriptor >= 0 && descriptor < DESCRIPTORS) below[descriptor] = 0;
    return REAL(int (*)(DIR *), closedir)(from);
}

#define HALF(descriptor, kind, bytes)                                                                                     \
    if (is_watched(descriptor)) {                                                                                         \
        int error = strike(kind, 0, descriptor, bytes);                                                                   \
        if (error > 0) {                                                                                                  \
            errno = error;                                                                                                \
            return -1;                                                                                                    \
        }                                                                                                                 \
        if (error < 0 && bytes > 1) bytes /= 2;                                                                           \
    }
ssize_t read(int descriptor, void *into, size_t bytes) {
    HALF(descriptor, READ, bytes)
    return REAL(ssize_t (*)(int, void *, size_t), read)(descriptor, into, bytes);
}
ssize_t pread64(int descriptor, void *into, size_t bytes, off64_t from) {
    HALF(descriptor, READ, bytes)
    return REAL(ssize_t (*)(int, void *, size_t, off64_t), pread64)(descriptor, into, bytes, from);
}
ssize_t pread(int descriptor, void *into, size_t bytes, off_t from) { return pread64(descriptor, into, bytes, from); }
ssize_t write(int descriptor, const void *from, size_t bytes) {
    HALF(descriptor, WRITE, bytes)
    return REAL(ssize_t (*)(int, const void *, size_t), write)(descriptor, from, bytes);
}
ssize_t pwrite64(int descriptor, const void *from, size_t bytes, off64_t to) {
    HALF(descriptor, WRITE, bytes)
    return REAL(ssize_t (*)(int, const void *, size_t, off64_t), pwrite64)(descriptor, from, bytes, to);
}
ssize_t pwrite(int descriptor, const void *from, size_t bytes, off_t to) {
    return pwrite64(descriptor, from, bytes, to);
}
ssize_t readv(int descriptor, const struct iovec *parts, int number) {
    FAIL_ON(READ, descriptor, -1)
    return REAL(ssize_t (*)(int, const struct iovec *, int), readv)(descriptor, parts, number);
}
ssize_t writev(int descriptor, const struct iovec *parts, int number) {
    FAIL_ON(WRITE, descriptor, -1)
    return REAL(ssize_t (*)(int, const struct iovec *, int), writev)(descriptor, parts, number);
}

int fsync(int descriptor) {
    FAIL_ON(SYNC, descriptor, -1)
    return without_sync ? 0 : REAL(int (*)(int), fsync)(descriptor);
}
int fdatasync(int descriptor) {
    FAIL_ON(SYNC, descriptor, -1)
    return without_sync ? 0 : REAL(int (*)(int), fdatasync)(descriptor);
}

int rename(const char *from, const char *to) {
    FAIL_AT(RENAME, AT_FDCWD, from, -1)
    return REAL(int (*)(const char *, const char *), rename)(from, to);
}
int renameat(int base, const char *from, int other, const char *to) {
    FAIL_AT(RENAME, base, from, -1)
    return REAL(int (*)(int, const char *, int, const char *), renameat)(base, from, other, to);
}
int renameat2(int base, const char *from, int other, const char *to, unsigned flags) {
    FAIL_AT(RENAME, base, from, -1)
    return REAL(int (*)(int, const char *, int, const char *, unsigned), renameat2)(base, from, other, to, flags);
}
int unlink(const char *path) {
    FAIL_AT(REMOVE, AT_FDCWD, path, -1)
    return REAL(int (*)(const char *), unlink)(path);
}
int unlinkat(int base, const char *path, int flags) {
    FAIL_AT(flags & AT_REMOVEDIR ? REMOVE_FOLDER : REMOVE, base, path, -1)
    return REAL(int (*)(int, const char *, int), unlinkat)(base, path, flags);
}
int mkdir(const char *path, mode_t rights) {
    FAIL_AT(MAKE_FOLDER, AT_FDCWD, path, -1)
    return REAL(int (*)(const char *, mode_t), mkdir)(path, rights);
}
int mkdirat(int base, const char *path, mode_t rights) {
    FAIL_AT(MAKE_FOLDER, base, path, -1)
    return REAL(int (*)(int, const char *, mode_t), mkdirat)(base, path, rights);
}
int rmdir(const char *path) {
    FAIL_AT(REMOVE_FOLDER, AT_FDCWD, path, -1)
    return REAL(int (*)(const char *), rmdir)(path);
}
int link(const char *from, const char *to) {
    FAIL_AT(LINK, AT_FDCWD, to, -1)
    return REAL(int (*)(const char *, const char *), link)(from, to);
}
int linkat(int base, const char *from, int other, const char *to, int flags) {
    FAIL_AT(LINK, other, to, -1)
    return REAL(int (*)(int, const char *, int, const char *, int), linkat)(base, from, other, to, flags);
}

int stat64(const char *path, struct stat64 *into) {
    FAIL_AT(LOOK, AT_FDCWD, path, -1)
    return REAL(int (*)(const char *, struct stat64 *), stat64)(path, into);
}
int lstat64(const char *path, struct stat64 *into) {
    FAIL_AT(LOOK, AT_FDCWD, path, -1)
    return REAL(int (*)(const char *, struct stat64 *), lstat64)(path, into);
}
int fstat64(int descriptor, struct stat64 *into) {
    FAIL_ON(LOOK, descriptor, -1)
    return REAL(int (*)(int, struct stat64 *), fstat64)(descriptor, into);
}
int fstatat64(int base, const char *path, struct stat64 *into, int flags) {
    FAIL_AT(LOOK, base, path, -1)
    return REAL(int (*)(int, const char *, struct stat64 *, int), fstatat64)(base, path, into, flags);
}
int stat(const char *path, struct stat *into) { return stat64(path, (struct stat64 *)into); }
int lstat(const char *path, struct stat *into) { return lstat64(path, (struct stat64 *)into); }
int fstat(int descriptor, struct stat *into) { return fstat64(descriptor, (struct stat64 *)into); }
int fstatat(int base, const char *path, struct stat *into, int flags) {
    return fstatat64(base, path, (struct stat64 *)into, flags);
}
int statx(int base, const char *path, int flags, unsigned which, struct statx *into) {
    if (!path[0]) {
        FAIL_ON(LOOK, base, -1)
    } else {
        FAIL_AT(LOOK, base, path, -1)
    }
    return REAL(int (*)(int, const char *, int, unsigned, struct statx *), statx)(base, path, flags, which, into);
}
/* What libraries built for an older glibc call. */
int __xstat64(int version, const char *path, struct stat64 *into) { return stat64(path, into); }
int __lxstat64(int version, const char *path, struct stat64 *into) { return lstat64(path, into); }
int __fxstat64(int version, int descriptor, struct stat64 *into) { return fstat64(descriptor, into); }

DIR *opendir(const char *path) {
    int ours = is_below(AT_FDCWD, path);
    FAIL_AT(LIST, AT_FDCWD, path, NULL)
    DIR *found = REAL(DIR * (*)(const char *), opendir)(path);
    if (found) opened(dirfd(found), ours);
    return found;
}
DIR *fdopendir(int descriptor) {
    FAIL_ON(LIST, descriptor, NULL)
    return REAL(DIR * (*)(int), fdopendir)(descriptor);
}
struct dirent64 *readdir64(DIR *from) {
    FAIL_ON(LIST, dirfd(from), NULL)
    return REAL(struct dirent64 * (*)(DIR *), readdir64)(from);
}
struct dirent *readdir(DIR *from) { return (struct dirent *)readdir64(from); }

int ftruncate64(int descriptor, off64_t bytes) {
    FAIL_ON(CUT, descriptor, -1)
    return REAL(int (*)(int, off64_t), ftruncate64)(descriptor, bytes);
}
int ftruncate(int descriptor, off_t bytes) { return ftruncate64(descriptor, bytes); }
int truncate64(const char *path, off64_t bytes) {
    FAIL_AT(CUT, AT_FDCWD, path, -1)
    return REAL(int (*)(const char *, off64_t), truncate64)(path, bytes);
}
int truncate(const char *path, off_t bytes) { return truncate64(path, bytes); }
void *mmap64(void *address, size_t bytes, int rights, int flags, int descriptor, off64_t from) {
    if (!(flags & MAP_ANONYMOUS)) {
        FAIL_ON(MAP, descriptor, MAP_FAILED)
    }
    return REAL(void *(*)(void *, size_t, int, int, int, off64_t), mmap64)(address, bytes, rights, flags, descriptor, from);
}
void *mmap(void *address, size_t bytes, int rights, int flags, int descriptor, off_t from) {
    return mmap64(address, bytes, rights, flags, descriptor, from);
}

/* The clock that people set: `seconds` off, or off by turns, `turn` calls right and as many off. */
static atomic_long clock_off, clock_turn, clock_calls;
void failing_disk_clock(long seconds, long turn) {
    clock_off = seconds;
    clock_turn = turn;
    clock_calls = 0;
}

int clock_gettime(clockid_t which, struct timespec *into) {
    int answer = REAL(int (*)(clockid_t, struct timespec *), clock_gettime)(which, into);
    if (!answer && which == CLOCK_REALTIME && clock_off) {
        long number = atomic_fetch_add(&clock_calls, 1);
        if (!clock_turn || number / clock_turn % 2) into->tv_sec += clock_off;
    }
    return answer;
}
time_t time(time_t *into) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (into) *into = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *into, void *zone) {
    struct timespec now;
    int answer = clock_gettime(CLOCK_REALTIME, &now);
    into->tv_sec = now.tv_sec;
    into->tv_usec = now.tv_nsec / 1000;
    return answer;
}
