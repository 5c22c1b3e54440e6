/* A library for LD_PRELOAD: flock, rename, fsync, or fsync of folders alone ("fsyncdir") fails in real processes, as on file systems that do not
   know it, are full, or read-only. "change" is every call that changes a folder or opens a file to be written: from one call on, the file system
   has become read-only, as Linux makes one whose disk has errors.

   NBCNN_FAILING is "NAME NUMBER FIRST COUNT": calls FIRST to FIRST + COUNT - 1 (counted from 0, by process) of NAME fail with error NUMBER, and the
   file named by NBCNN_FAILED is made. Only calls for paths below the folder NBCNN_BELOW count. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static atomic_long calls;

static int is_below(const char *path)
{
    const char *below = getenv("NBCNN_BELOW");
    return !below || !strncmp(path, below, strlen(below));
}

static int is_descriptor_below(int descriptor)
{
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return is_below(path);
}

static int fails(const char *name)
{
    char asked[16];
    int number;
    long first, count;
    const char *given = getenv("NBCNN_FAILING"), *failed = getenv("NBCNN_FAILED");
    if (!given || sscanf(given, "%15s %d %ld %ld", asked, &number, &first, &count) != 4 || strcmp(asked, name))
        return 0;
    long call = atomic_fetch_add(&calls, 1);
    if (call < first || call - first >= count)
        return 0;
    if (failed)
        close(open(failed, O_CREAT | O_WRONLY, 0600));
    errno = number;
    return 1;
}

int flock(int descriptor, int operation)
{
    static int (*real)(int, int);
    if (is_descriptor_below(descriptor) && fails("flock"))
        return -1;
    if (!real)
        real = (int (*)(int, int))dlsym(RTLD_NEXT, "flock");
    return real(descriptor, operation);
}

int rename(const char *from, const char *to)
{
    static int (*real)(const char *, const char *);
    if (is_below(to) && (fails("rename") || fails("change")))
        return -1;
    if (!real)
        real = (int (*)(const char *, const char *))dlsym(RTLD_NEXT, "rename");
    return real(from, to);
}

int fsync(int descriptor)
{
    static int (*real)(int);
    struct stat found;
    int folder = !fstat(descriptor, &found) && S_ISDIR(found.st_mode);
    if (is_descriptor_below(descriptor) && (fails("fsync") || (folder && fails("fsyncdir"))))
        return -1;
    if (!real)
        real = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    return real(descriptor);
}

int open64(const char *path, int flags, ...)
{
    static int (*real)(const char *, int, ...);
    va_list more;
    va_start(more, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;
    va_end(more);
    if ((flags & O_ACCMODE) != O_RDONLY && is_below(path) && fails("change"))
        return -1;
    if (!real)
        real = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open64");
    return real(path, flags, mode);
}

int unlink(const char *path)
{
    static int (*real)(const char *);
    if (is_below(path) && fails("change"))
        return -1;
    if (!real)
        real = (int (*)(const char *))dlsym(RTLD_NEXT, "unlink");
    return real(path);
}

int mkdir(const char *path, mode_t mode)
{
    static int (*real)(const char *, mode_t);
    if (is_below(path) && fails("change"))
        return -1;
    if (!real)
        real = (int (*)(const char *, mode_t))dlsym(RTLD_NEXT, "mkdir");
    return real(path, mode);
}
