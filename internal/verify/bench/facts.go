package main

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"
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
	"go.etcd.io/etcd/server/v3",
	"go.etcd.io/etcd/client/v3",
	"github.com/nats-io/nats-server/v2",
	"github.com/nats-io/nats.go",
}

func machineFacts(p *postgres) facts {
	f := facts{
		CPUs:     runtime.NumCPU(),
		OS:       runtime.GOOS + "/" + runtime.GOARCH,
		Go:       runtime.Version(),
		Postgres: p.version,
		Durable:  p.durable,
		Modules:  map[string]string{},
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return f
	}
	for _, dep := range info.Deps {
		for _, name := range modules {
			if dep.Path == name {
				f.Modules[name] = dep.Version
			}
		}
	}
	return f
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
