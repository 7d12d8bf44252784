# What a layer further up changes, at the root of a tree.
set -eu
mkdir -p srv/gone/deep srv/opaque/deep srv/was-dir/deep srv/a srv/b srv/kept srv/linked 'srv/odd names' srv/nested
echo 1 >srv/gone/file; ln srv/gone/file srv/gone/deep/link
echo 2 >srv/opaque/file; echo 3 >srv/opaque/deep/file
echo 4 >srv/was-dir/deep/file; echo 5 >srv/was-file; ln -s kept srv/was-link
echo 6 >srv/a/one; echo 7 >srv/kept/file; echo 8 >srv/kept/other
head -c 300000 /dev/urandom >srv/kept/noise
ln srv/kept/noise srv/linked/1; ln srv/kept/noise srv/linked/2
mknod srv/kept/was-device c 1 3
chmod 700 srv/kept
touch -d '2020-01-02 03:04:05.123456789' srv/kept/file
