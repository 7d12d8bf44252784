package main

import (
	"context"
	"net/http"
	"path/filepath"
	"runtime"

	guestv1 "github.com/harena-dev/harena/api/harena/guest/v1"
	"github.com/harena-dev/harena/api/harena/v1/harenav1connect"
	"github.com/harena-dev/harena/internal/cgroup"
	"github.com/harena-dev/harena/internal/sandbox"
	"github.com/harena-dev/harena/internal/supervisor"
	"github.com/harena-dev/harena/internal/supervisor/exec"
	"github.com/harena-dev/harena/internal/supervisor/files"
	"github.com/harena-dev/harena/internal/supervisor/launch"
	"github.com/harena-dev/harena/internal/supervisor/users"
)

// prepared starts containers.
type prepared struct{ *launch.Prepared }

func prepare() (supervisor.Prepared, error) {
	p, err := launch.Prepare(nil)
	if err != nil {
		return nil, err
	}
	return prepared{p}, nil
}

// Launch implements supervisor.Prepared.
func (p prepared) Launch(ctx context.Context, l *guestv1.Launch) (supervisor.Sandbox, error) {
	s, err := p.Prepared.Launch(ctx, l)
	if err != nil {
		return nil, err
	}
	return container{s}, nil
}

type container struct{ *launch.Sandbox }

// Services implements supervisor.Sandbox.
func (c container) Services(e supervisor.Env) (supervisor.Services, error) {
	id, err := sandbox.ParseID(e.Launch.GetSandboxId())
	if err != nil {
		return supervisor.Services{}, err
	}
	groups := e.Launch.GetCgroups()
	defaultUser := e.Launch.GetProcess().GetUser()

	// Users are found in files, and files are worked on as users.
	var fileService *files.Service
	lookup := users.New(users.Config{
		Read: func(ctx context.Context, path string, most int64) ([]byte, error) {
			return fileService.ReadSmall(ctx, path, most)
		},
		Root:        c.Root,
		DefaultUser: defaultUser,
	})
	fileService = files.New(files.Config{
		SandboxID: id, Starter: c.Sandbox, Users: lookup, DefaultUser: defaultUser, Activity: e.Activity, Log: e.Log,
	})
	execService, err := exec.New(exec.Config{
		SandboxID: id,
		Hostname:  e.Launch.GetHostname(),
		Spawner:   c.Spawner(),
		Users:     lookup,
		Groups:    cgroup.Dir(groups.GetTracking()),
		Devpts:    c.Devpts,
		IDBase:    e.Launch.GetIdBase(),
		RecordDir: filepath.Join(e.Launch.GetDir(), "commands"),
		Defaults:  e.Launch.GetProcess(),
		OOMKills: func() int64 {
			n, err := cgroup.OOMKills(cgroup.Dir(groups.GetTracking()), groups.GetV1())
			if err != nil {
				e.Log.Warn("out-of-memory kills cannot be counted", "error", err)
			}
			return n
		},
		Activity: e.Activity,
		Log:      e.Log,
	})
	if err != nil {
		return supervisor.Services{}, err
	}

	options := supervisor.HandlerOptions()
	return supervisor.Services{
		Handlers: map[string]func() http.Handler{
			"/" + harenav1connect.ExecServiceName + "/": func() http.Handler {
				_, h := execService.Handler(options)
				return h
			},
			"/" + harenav1connect.FileServiceName + "/": func() http.Handler {
				_, h := harenav1connect.NewFileServiceHandler(fileService, options)
				return h
			},
			"/v1/sandboxes/": func() http.Handler {
				// The edge's side and the worker's side of a transfer take a core each.
				runtime.GOMAXPROCS(2)
				return fileService.HTTP()
			},
		},
		Running: execService.Running,
		Close: func() error {
			fileService.Close()
			return execService.Close()
		},
	}, nil
}
