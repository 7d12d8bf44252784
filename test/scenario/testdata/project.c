// Gives a file another project for disk quotas, and a directory one that what is made in it inherits. Exits with 0 if either worked.
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

static int change(const char *path, unsigned project, unsigned set, unsigned clear)
{
	struct fsxattr x;
	int fd = open(path, O_RDONLY);
	if (fd < 0 || ioctl(fd, FS_IOC_FSGETXATTR, &x)) {
		printf("%s: %s\n", path, strerror(errno));
		return 0;
	}
	unsigned before = x.fsx_projid, flags = x.fsx_xflags;
	x.fsx_projid = project == ~0u ? before : project;
	x.fsx_xflags = (flags | set) & ~clear;
	int err = ioctl(fd, FS_IOC_FSSETXATTR, &x) ? errno : 0;
	if (ioctl(fd, FS_IOC_FSGETXATTR, &x))
		printf("%s: %s\n", path, strerror(errno));
	int changed = x.fsx_projid != before || x.fsx_xflags != flags;
	printf("%s: project %u, flags %#x; then %u, %#x: %s\n", path, before, flags, x.fsx_projid, x.fsx_xflags, strerror(err));
	close(fd);
	return changed;
}

int main(int argc, char **argv)
{
	if (argc != 3)
		return 2;
	int changed = 0;
	for (int i = 1; i < 3; i++)
		changed |= change(argv[i], 0, 0, 0) | change(argv[i], 7, 0, 0) | change(argv[i], ~0u, 0, FS_XFLAG_PROJINHERIT);
	return !changed;
}
