package main

import (
	"context"
	"fmt"
	"os/exec"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/tenurelib/tenure/internal/testkit/rig"
)

// facts describe the environment in which figures were measured.
type facts struct {
	CPUs     int               `json:"cpus"`
	OS       string            `json:"os"`
	Go       string            `json:"go"`
	Postgres string            `json:"postgres"`
	Durable  bool              `json:"durable"` // Postgres waits for its disk
	Modules  map[string]string `json:"modules"`
}

// modules are the modules whose versions are reported.
var modules = []string{
	"cirello.io/pglock",
	"github.com/lib/pq",
	"github.com/jackc/pgx/v5",
	"k8s.io/client-go",
	"github.com/riverqueue/river",
	etcdServer,
	"go.etcd.io/etcd/client/v3",
	natsServer,
	"github.com/nats-io/nats.go",
	mariaDB,
}

// The modules of servers, which are not a part of this program.
const (
	etcdServer = "go.etcd.io/etcd/server/v3"
	natsServer = "github.com/nats-io/nats-server/v2"
	mariaDB    = "MariaDB" // no module: it is installed
)

func machineFacts(ctx context.Context, p *postgres) (facts, error) {
	f := facts{
		CPUs:     runtime.NumCPU(),
		OS:       runtime.GOOS + "/" + runtime.GOARCH,
		Go:       runtime.Version(),
		Postgres: p.version,
		Durable:  p.durable,
		Modules:  map[string]string{},
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, dep := range info.Deps {
			if slices.Contains(modules, dep.Path) {
				f.Modules[dep.Path] = dep.Version
			}
		}
	}
	for _, name := range []string{etcdServer, natsServer} {
		version, err := rig.Version(ctx, name)
		if err != nil {
			return f, err
		}
		f.Modules[name] = version
	}
	if says, err := exec.CommandContext(ctx, rig.MariaDBProgram, "--version").Output(); err == nil { // mariadbd  Ver 10.11.19-MariaDB-…
		f.Modules[mariaDB] = strings.Fields(string(says))[2]
	}
	return f, nil
}

func (f facts) String() string {
	disk := "fsync on"
	if !f.Durable {
		disk = "not waiting for its disk"
	}
	var versions []string
	for _, name := range modules {
		if v, ok := f.Modules[name]; ok {
			versions = append(versions, name+" "+v)
		}
	}
	return fmt.Sprintf("%d CPUs, %s, %s, PostgreSQL %s (%s); %s",
		f.CPUs, f.OS, f.Go, f.Postgres, disk, strings.Join(versions, ", "))
}
