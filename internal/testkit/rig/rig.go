// Package rig runs what the programs chaos and bench measure and break: servers of etcd, NATS and MariaDB,
// each in a process of its own, and proxies between them and their clients. Postgres is started by
// package testkit. Package rig is for the programs and tests of this repository, without a promise
// of compatibility.
package rig

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"

	"github.com/tenurelib/tenure/internal/testkit"
)

var programs sync.Map // by import path

// Program returns the path of a server's program, given its import path. The go command builds it
// if necessary: the module of proof names it as a tool. The working directory must be in a module
// of this repository.
func Program(ctx context.Context, path string) (string, error) {
	if program, ok := programs.Load(path); ok {
		return program.(string), nil
	}
	program, err := inProof(ctx, "tool", "-n", path)
	if err == nil {
		programs.Store(path, program)
	}
	return program, err
}

// Version returns the version of the module that a program comes from.
func Version(ctx context.Context, module string) (string, error) {
	return inProof(ctx, "list", "-m", "-f", "{{.Version}}", module)
}

// inProof runs the go command in the module of proof.
func inProof(ctx context.Context, args ...string) (string, error) {
	root, err := command(ctx, "list", "-m", "-f", "{{.Dir}}", "github.com/tenurelib/tenure")
	if err != nil {
		return "", err
	}
	return command(ctx, append([]string{"-C", filepath.Join(root, "proof")}, args...)...)
}

func command(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w", cmd, err)
	}
	return strings.TrimSpace(string(out)), nil
}

// address returns the host and a free port of this machine.
func address() (string, error) {
	port, err := testkit.FreePort()
	return fmt.Sprint("127.0.0.1:", port), err
}

// Etcd is an etcd server, by default the only member of its cluster.
type Etcd struct {
	Server
	Peer string   // the URL where other members reach it
	Data string   // the directory of its data
	Args []string // further arguments of its program, which take precedence
}

const member = "default" // the name of the only member

// NewEtcd returns a server that is not started yet, with further arguments for its program. It syncs
// each write to its directory, which also has its log.
func NewEtcd(ctx context.Context, dir string, args ...string) (*Etcd, error) {
	program, err := Program(ctx, "go.etcd.io/etcd/server/v3")
	if err != nil {
		return nil, err
	}
	client, err := address()
	if err != nil {
		return nil, err
	}
	peer, err := address()
	if err != nil {
		return nil, err
	}
	e := &Etcd{Peer: "http://" + peer, Data: filepath.Join(dir, "data"), Args: args}
	e.URL = &url.URL{Scheme: "http", Host: client}
	e.Log = filepath.Join(dir, "etcd.log")
	e.Answers = healthy(anew, e.URL.String()+"/health")
	e.Command = func() *exec.Cmd {
		return exec.Command(program, append([]string{"--name", member, "--data-dir", e.Data, "--log-level", "warn",
			"--listen-client-urls", e.URL.String(), "--advertise-client-urls", e.URL.String(),
			"--listen-peer-urls", e.Peer, "--initial-advertise-peer-urls", e.Peer, "--initial-cluster", member + "=" + e.Peer}, e.Args...)...)
	}
	return e, nil
}

// Restore replaces the data of a stopped server with a snapshot. The token names the cluster: with
// another token the server belongs to another cluster. Further arguments are for etcdutl.
func (e *Etcd) Restore(ctx context.Context, snapshot, token string, args ...string) error {
	program, err := Program(ctx, "go.etcd.io/etcd/etcdutl/v3")
	if err != nil {
		return err
	}
	if err := os.RemoveAll(e.Data); err != nil {
		return err
	}
	args = append([]string{"snapshot", "restore", snapshot, "--data-dir", e.Data, "--name", member,
		"--initial-cluster", member + "=" + e.Peer, "--initial-advertise-peer-urls", e.Peer, "--initial-cluster-token", token}, args...)
	out, err := exec.CommandContext(ctx, program, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("restore: %w: %s", err, out)
	}
	return nil
}

// NewNATS returns a NATS server with JetStream that is not started yet. It syncs each write to its
// directory. The store has no limit but the disk: otherwise the server takes its limit from what is
// free when it starts, which is nothing while the disk is full.
func NewNATS(ctx context.Context, dir, log string) (*Server, error) {
	program, err := Program(ctx, "github.com/nats-io/nats-server/v2")
	if err != nil {
		return nil, err
	}
	client, err := address()
	if err != nil {
		return nil, err
	}
	monitor, err := address()
	if err != nil {
		return nil, err
	}
	config := filepath.Join(dir, "nats.conf")
	text := fmt.Sprintf("listen: %q\nhttp: %q\njetstream { store_dir: %q, max_file_store: 1TB, sync_interval: always }\n",
		client, monitor, filepath.Join(dir, "data"))
	if err := os.WriteFile(config, []byte(text), 0o644); err != nil {
		return nil, err
	}
	return &Server{
		Process: Process{Command: func() *exec.Cmd { return exec.Command(program, "-c", config) }, Log: log},
		URL:     &url.URL{Scheme: "nats", Host: client},
		Answers: healthy(anew, "http://"+monitor+"/healthz"),
	}, nil
}
