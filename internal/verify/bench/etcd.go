package main

import (
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"

	"github.com/tenurelib/tenure/internal/verify/freeport"
)

// etcd is one node in this process, with its data on disk in a temporary directory. It
// starts when it is first needed.
type etcd struct {
	mu     sync.Mutex // guards the fields below
	dir    string
	server *embed.Etcd
	url    string
}

func (e *etcd) start() (string, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.server != nil {
		return e.url, nil
	}
	var err error
	if e.dir, err = os.MkdirTemp("", "tenure-bench-etcd-"); err != nil {
		return "", err
	}
	var urls [2]url.URL
	for i := range urls {
		port, err := freeport.Find()
		if err != nil {
			return "", err
		}
		urls[i] = url.URL{Scheme: "http", Host: fmt.Sprint("127.0.0.1:", port)}
	}
	client, peer := urls[0], urls[1]
	cfg := embed.NewConfig()
	cfg.Name = "bench"
	cfg.Dir = filepath.Join(e.dir, "data")
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{client}, []url.URL{client}
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = []url.URL{peer}, []url.URL{peer}
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
	server, err := embed.StartEtcd(cfg)
	if err != nil {
		return "", fmt.Errorf("etcd: %w", err)
	}
	select {
	case <-server.Server.ReadyNotify():
	case <-time.After(30 * time.Second):
		server.Close()
		return "", errors.New("etcd: not ready after 30 s")
	}
	e.server, e.url = server, client.String()
	return e.url, nil
}

func (e *etcd) close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.server != nil {
		e.server.Close()
		<-e.server.Server.StopNotify()
		e.server = nil
	}
	if e.dir == "" {
		return nil
	}
	return os.RemoveAll(e.dir)
}
