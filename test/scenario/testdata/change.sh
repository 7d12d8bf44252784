# The changes of a layer over what before.sh made, with all that a tar can say of a file. Whiteouts and links to files of
# lower layers are added by who packs it.
set -eu
rm -r srv/gone; rm srv/kept/other srv/kept/was-device
rm -r srv/opaque; mkdir srv/opaque; echo new >srv/opaque/new
rm -r srv/was-dir; echo now a file >srv/was-dir
rm srv/was-file; mkdir srv/was-file; echo below >srv/was-file/below
rm srv/was-link; mkdir srv/was-link; echo below >srv/was-link/below
ln srv/kept/file srv/b/file-of-below
echo linked >srv/a/h1; ln srv/a/h1 srv/b/h2; ln srv/a/h1 'srv/odd names/h3'
ln -s ../a/h1 srv/b/symlink; ln -s /nowhere/$(printf 'x%.0s' $(seq 300)) srv/b/long-symlink
echo su >srv/a/setuid; chmod 4755 srv/a/setuid; echo sg >srv/a/setgid; chown 12:34 srv/a/setgid; chmod 2711 srv/a/setgid
mkdir srv/a/sticky; chown 1000:1001 srv/a/sticky; chmod 1777 srv/a/sticky; mkdir srv/a/gdir; chmod 2770 srv/a/gdir
echo none >srv/a/mode-none; chown 65533:65533 srv/a/mode-none; chmod 0 srv/a/mode-none
echo cap >srv/a/cap; setfattr -n security.capability -v 0x0100000200200000000000000000000000000000 srv/a/cap
setfattr -h -n security.harena -v link srv/b/symlink
setfattr -n user.text -v value srv/a/h1; setfattr -n user.binary -v 0x00ff0a3d00 srv/a/h1; setfattr -n user.dir -v on srv/a/gdir
setfattr -n user.long -v "$(printf 'y%.0s' $(seq 2000))" srv/a/one
mknod srv/a/char c 10 200; mknod srv/a/block b 259 70000; mknod srv/a/null c 1 3; mkfifo -m 620 srv/a/fifo; chown 5:6 srv/a/char
for f in char block fifo sticky; do setfattr -n security.harena -v $f srv/a/$f; done
: >srv/a/empty; mkdir srv/a/empty-dir
touch "srv/odd names/new
line" "srv/odd names/$(printf '\377\001')" "srv/odd names/ü ß" 'srv/odd names/*' "srv/odd names/$(printf 'n%.0s' $(seq 255))"
deep=srv/nested; for i in $(seq 40); do deep=$deep/directory-$i; done; mkdir -p "$deep"; echo deep >"$deep/file"
touch -d '2001-02-03 04:05:06.000000001' srv/a/h1; touch -d '1965-04-03 02:01:00.999999999' srv/a/empty; touch -d '2200-01-01 00:00:00.5' srv/a/cap
touch -h -d '1999-12-31 23:59:59.987654321' srv/b/symlink; touch -d '2010-10-10 10:10:10.101010101' srv/a/char srv/a/fifo
touch -d '2011-11-11 11:11:11.111111111' srv/a/sticky srv/a srv/b srv/opaque srv/kept srv
