/* Counts durable operations below one folder, in every process of a run, and makes the N-th of them fail.
 *
 * Loaded with LD_PRELOAD into Python, git, DVC, Ray's workers and SQLite alike. FAULT_STATE names a file that
 * holds `struct state` and that all processes map, so that they count together; <state>.trace gets a line for each
 * operation below `root`. What changes nothing is none: a folder that exists is made, a file that does not is deleted, or
 * one that does is opened and kept. What is not seen: writes through mmap, and what libc's stdio writes by itself.
 *
 * With `only` ("write /data/raw/pairs.jsonl", wildcards allowed) the N-th of such operations is meant. What goes to and
 * comes from a server at `port` of this machine counts as well.
 *
 * Faults, as `kind`: 1 SIGKILL to the process group of the command and to that of the process that reached the
 * operation (half of a write is done first); 2 ENOSPC from the N-th operation on, for what takes space; 3 EIO, once;
 * 4 a dropped connection. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NONE, KILLED, FULL, BROKEN, DROPPED };
struct state { long at, kind, group, count, fired, port, matched; char only[256], root[1024]; };

static struct state *state;
static char trace[PATH_MAX]; /* a copy: setproctitle writes over the environment */

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("FAULT_STATE");
  if (!path) return;
  snprintf(trace, sizeof trace, "%s.trace", path);
  int fd = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0);
  if (fd < 0) return;
  void *mapped = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  syscall(SYS_close, fd);
  if (mapped != MAP_FAILED) state = mapped;
}

static void note(long number, const char *what, const char *path) {
  char line[PATH_MAX + 64];
  int size = snprintf(line, sizeof line, "%ld %d %s %s\n", number, getpid(), what, path);
  int fd = syscall(SYS_openat, AT_FDCWD, trace, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return;
  syscall(SYS_write, fd, line, (size_t)size < sizeof line ? size : (int)sizeof line - 1);
  syscall(SYS_close, fd);
}

/* 0, or the errno of the fault; KILLED as -1, so that a write can be torn before. */
static int reached(const char *what, const char *path, int takes_space) {
  size_t length = strlen(state->root);
  if (strncmp(path, state->root, length) || path[length] != '/' || strstr(path, "/__pycache__")) return 0;
  long number = __atomic_add_fetch(&state->count, 1, __ATOMIC_SEQ_CST);
  note(number, what, path);
  if (!state->at) return 0;
  if (!state->fired) {
    if (state->only[0]) {
      char name[PATH_MAX + 64];
      snprintf(name, sizeof name, "%s %s", what, path + length);
      number = fnmatch(state->only, name, 0) ? 0 : __atomic_add_fetch(&state->matched, 1, __ATOMIC_SEQ_CST);
    }
    if (number < state->at) return 0;
    state->fired = 1;
    if (state->kind == KILLED) return -1;
    if (state->kind == BROKEN) return EIO;
    if (state->kind == DROPPED) return ECONNRESET;
  }
  return state->kind == FULL && takes_space ? ENOSPC : 0;
}

static void die(void) {
  if (state->group > 1) kill(-(pid_t)state->group, SIGKILL);
  kill(0, SIGKILL);
  for (;;) pause();
}

enum { ALWAYS, IF_THERE, IF_NOT }; /* when it changes something */

static int at_path(const char *what, int folder, const char *path, int when, int takes_space) {
  struct stat found;
  char full[2 * PATH_MAX], link[64];
  if (!state || !path) return 0;
  int saved = errno;
  if (path[0] == '/') snprintf(full, sizeof full, "%s", path);
  else {
    char base[PATH_MAX] = "";
    if (folder == AT_FDCWD) { if (!getcwd(base, sizeof base)) base[0] = 0; }
    else {
      snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
      ssize_t size = syscall(SYS_readlinkat, AT_FDCWD, link, base, sizeof base - 1);
      base[size > 0 ? size : 0] = 0;
    }
    snprintf(full, sizeof full, "%s/%s", base, path);
  }
  int there = fstatat(AT_FDCWD, full, &found, AT_SYMLINK_NOFOLLOW) == 0;
  int fault = when == (there ? IF_NOT : IF_THERE) ? 0 : reached(what, full, takes_space && !there);
  errno = saved;
  if (fault < 0) die();
  return fault;
}

static int at_file(const char *what, int fd, int takes_space) {
  char full[PATH_MAX], link[64];
  if (!state) return 0;
  int saved = errno;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t size = syscall(SYS_readlinkat, AT_FDCWD, link, full, sizeof full - 1);
  full[size > 0 ? size : 0] = 0;
  int fault = full[0] == '/' ? reached(what, full, takes_space) : 0;
  errno = saved;
  return fault;
}

/* The path of the latest request, without its arguments: what is received is of it. */
static void note_request(const char *data, size_t size, char *request) {
  const char *path = memchr(data, '/', size < 8 ? size : 8);
  size_t length = 0;
  if (!path || !memmem(data, size, " HTTP/1.", 8)) return;
  while (path + length < data + size && length < 120 && path[length] > ' ' && path[length] != '?') length++;
  snprintf(request, 128, "%.*s", (int)length, path);
}

static int at_server(const char *what, int fd, const void *data, size_t size) {
  static char request[128];
  struct sockaddr_in peer = {0};
  char name[PATH_MAX + 192];
  int saved = errno;
  socklen_t length = sizeof peer;
  if (!state || !state->port) return 0;
  int ours = !getpeername(fd, (struct sockaddr *)&peer, &length) && peer.sin_family == AF_INET && ntohs(peer.sin_port) == state->port;
  errno = saved;
  if (!ours) return 0;
  if (data) note_request(data, size, request);
  snprintf(name, sizeof name, "%s/server%s", state->root, request);
  int fault = reached(what, name, 0);
  if (fault > 0) shutdown(fd, SHUT_RDWR);
  errno = saved;
  return fault;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAIL(fault, failed) do { int f_ = (fault); if (f_ < 0) die(); if (f_) { errno = f_; return failed; } } while (0)
#define WRITES(flags) (((flags) & (O_WRONLY | O_RDWR)) && ((flags) & (O_CREAT | O_TRUNC)))
#define MODE(flags) mode_t mode = 0; if ((flags) & (O_CREAT | O_TMPFILE)) { va_list a; va_start(a, flags); mode = va_arg(a, int); va_end(a); }

#define OPEN(name) int name(const char *path, int flags, ...) { MODE(flags) \
  if (WRITES(flags)) FAIL(at_path("open", AT_FDCWD, path, flags & O_TRUNC ? ALWAYS : IF_NOT, 1), -1); return REAL(name)(path, flags, mode); }
#define OPENAT(name) int name(int folder, const char *path, int flags, ...) { MODE(flags) \
  if (WRITES(flags)) FAIL(at_path("open", folder, path, flags & O_TRUNC ? ALWAYS : IF_NOT, 1), -1); return REAL(name)(folder, path, flags, mode); }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)
#define FOPEN(name) FILE *name(const char *path, const char *mode) { \
  if (strpbrk(mode, "wa")) FAIL(at_path("open", AT_FDCWD, path, strchr(mode, 'w') ? ALWAYS : IF_NOT, 1), NULL); return REAL(name)(path, mode); }
FOPEN(fopen) FOPEN(fopen64)

ssize_t write(int fd, const void *data, size_t size) {
  int fault = at_file("write", fd, 1);
  if (fault < 0) { REAL(write)(fd, data, size / 2); die(); }
  FAIL(fault, -1);
  return REAL(write)(fd, data, size);
}
#define PWRITE(name, offset_t) ssize_t name(int fd, const void *data, size_t size, offset_t offset) { \
  int fault = at_file("write", fd, 1); \
  if (fault < 0) { REAL(name)(fd, data, size / 2, offset); die(); } \
  FAIL(fault, -1); return REAL(name)(fd, data, size, offset); }
PWRITE(pwrite, off_t) PWRITE(pwrite64, off64_t)
ssize_t writev(int fd, const struct iovec *parts, int count) { FAIL(at_file("write", fd, 1), -1); return REAL(writev)(fd, parts, count); }
ssize_t sendfile(int to, int from, off_t *offset, size_t size);
ssize_t sendfile(int to, int from, off_t *offset, size_t size) { FAIL(at_file("write", to, 1), -1); return REAL(sendfile)(to, from, offset, size); }
ssize_t sendfile64(int to, int from, off64_t *offset, size_t size);
ssize_t sendfile64(int to, int from, off64_t *offset, size_t size) { FAIL(at_file("write", to, 1), -1); return REAL(sendfile64)(to, from, offset, size); }
ssize_t copy_file_range(int from, off64_t *a, int to, off64_t *b, size_t size, unsigned flags) { FAIL(at_file("write", to, 1), -1); return REAL(copy_file_range)(from, a, to, b, size, flags); }
int ftruncate(int fd, off_t size) { FAIL(at_file("truncate", fd, size > 0), -1); return REAL(ftruncate)(fd, size); }
int ftruncate64(int fd, off64_t size) { FAIL(at_file("truncate", fd, size > 0), -1); return REAL(ftruncate64)(fd, size); }
int posix_fallocate(int fd, off_t from, off_t size) { int f = at_file("write", fd, 1); if (f < 0) die(); return f ? f : REAL(posix_fallocate)(fd, from, size); }
int fsync(int fd) { FAIL(at_file("fsync", fd, 0), -1); return REAL(fsync)(fd); }
int fdatasync(int fd) { FAIL(at_file("fsync", fd, 0), -1); return REAL(fdatasync)(fd); }
int rename(const char *a, const char *b) { FAIL(at_path("rename", AT_FDCWD, b, ALWAYS, 0), -1); return REAL(rename)(a, b); }
int renameat(int x, const char *a, int y, const char *b) { FAIL(at_path("rename", y, b, ALWAYS, 0), -1); return REAL(renameat)(x, a, y, b); }
int renameat2(int x, const char *a, int y, const char *b, unsigned flags) { FAIL(at_path("rename", y, b, ALWAYS, 0), -1); return REAL(renameat2)(x, a, y, b, flags); }
int link(const char *a, const char *b) { FAIL(at_path("link", AT_FDCWD, b, ALWAYS, 1), -1); return REAL(link)(a, b); }
int linkat(int x, const char *a, int y, const char *b, int flags) { FAIL(at_path("link", y, b, ALWAYS, 1), -1); return REAL(linkat)(x, a, y, b, flags); }
int symlink(const char *a, const char *b) { FAIL(at_path("link", AT_FDCWD, b, ALWAYS, 1), -1); return REAL(symlink)(a, b); }
int symlinkat(const char *a, int y, const char *b) { FAIL(at_path("link", y, b, ALWAYS, 1), -1); return REAL(symlinkat)(a, y, b); }
int unlink(const char *path) { FAIL(at_path("unlink", AT_FDCWD, path, IF_THERE, 0), -1); return REAL(unlink)(path); }
int unlinkat(int folder, const char *path, int flags) { FAIL(at_path("unlink", folder, path, IF_THERE, 0), -1); return REAL(unlinkat)(folder, path, flags); }
int rmdir(const char *path) { FAIL(at_path("unlink", AT_FDCWD, path, IF_THERE, 0), -1); return REAL(rmdir)(path); }
int mkdir(const char *path, mode_t mode) { FAIL(at_path("mkdir", AT_FDCWD, path, IF_NOT, 1), -1); return REAL(mkdir)(path, mode); }
int mkdirat(int folder, const char *path, mode_t mode) { FAIL(at_path("mkdir", folder, path, IF_NOT, 1), -1); return REAL(mkdirat)(folder, path, mode); }
ssize_t send(int fd, const void *data, size_t size, int flags) { FAIL(at_server("send", fd, data, size), -1); return REAL(send)(fd, data, size, flags); }
ssize_t recv(int fd, void *data, size_t size, int flags) { FAIL(at_server("receive", fd, NULL, 0), -1); return REAL(recv)(fd, data, size, flags); }
