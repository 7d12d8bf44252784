package packdiff

import "strings"

// defaults are the rules that hold unless a snapshot is taken without cleaning. docs/snapshots.md has them for people; a test
// keeps the two equal.
const defaults = `
# What is temporary by name.
/tmp/**
/var/tmp/**
/run/**
/var/run/**
/var/lock/**
/dev/shm/**
# Caches and package lists: what can be fetched or computed again.
/var/cache/**
/var/lib/apt/lists/**
/var/lib/apt/periodic/**
/var/lib/dnf/**
/var/lib/yum/**
~/.cache/**
~/.npm/_cacache/**
~/.npm/_logs/**
~/.cargo/registry/cache/**
~/.gradle/caches/**
~/.local/share/Trash/**
~/.thumbnails/**
# Histories: what was typed and looked at.
**/.bash_history
**/.zsh_history
**/.zhistory
**/.sh_history
**/.ash_history
**/.history
**/.python_history
**/.node_repl_history
**/.irb_history
**/.psql_history
**/.mysql_history
**/.sqlite_history
**/.rediscli_history
**/.dbshell
**/.lesshst
**/.viminfo
**/.wget-hsts
~/.local/share/fish/fish_history
~/.local/share/recently-used.xbel
~/.ipython/profile_default/history.sqlite
**/.*.sw[op]
**/.ipynb_checkpoints
# Logs, mail and dumps.
/var/log/**
/var/mail/**
/var/spool/mail/**
/var/spool/cron/**
/var/crash/**
/var/lib/systemd/coredump/**
**/core.[0-9]*
**/nohup.out
**/npm-debug.log
# Credentials.
~/.ssh/**
~/.gnupg/**
~/.aws/**
~/.azure/**
~/.config/gcloud/**
~/.config/gh/**
~/.config/glab-cli/**
~/.config/hub
~/.config/git/credentials
~/.config/containers/auth.json
~/.config/huggingface/**
~/.config/pip/pip.conf
~/.config/rclone/rclone.conf
~/.config/doctl/**
~/.huggingface/token
~/.kaggle/**
~/.kube/**
~/.docker/config.json
~/.netrc
**/.git-credentials
~/.npmrc
~/.yarnrc
~/.pypirc
~/.pip/pip.conf
~/.gem/credentials
~/.cargo/credentials
~/.cargo/credentials.toml
~/.m2/settings.xml
~/.m2/settings-security.xml
~/.gradle/gradle.properties
~/.composer/auth.json
~/.terraform.d/credentials.tfrc.json
~/.vault-token
~/.pgpass
~/.my.cnf
~/.s3cfg
~/.boto
~/.subversion/auth/**
~/.config/harena/**
/etc/ssh/ssh_host_*_key
/etc/ssh/ssh_host_*_key.pub
# What makes two machines the same.
/var/lib/systemd/random-seed
/var/lib/urandom/random-seed
/var/lib/dhcp/**
`

// Defaults lists the rules that hold unless a snapshot is taken without cleaning.
func Defaults() []string {
	var out []string
	for line := range strings.Lines(defaults) {
		if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
			out = append(out, line)
		}
	}
	return out
}

// written are files of every sandbox that Harena makes anew when it starts: they are its, not the snapshot's.
var written = map[string]bool{"etc/hostname": true, "etc/hosts": true, "etc/resolv.conf": true}

// mountPoints are made where an image lacks them.
var mountPoints = map[string]bool{"proc": true, "sys": true, "dev": true}
