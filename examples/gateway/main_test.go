//go:build unix

package main

import (
	"context"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/internal/testkit"
)

// serveFor runs a gateway until it ends by itself or the time has passed, and returns its
// error and its log.
func serveFor(t *testing.T, d time.Duration, change func(*config)) (string, error) {
	t.Helper()
	var log testkit.SyncBuffer
	defer slog.SetDefault(slog.Default())
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	dir := t.TempDir()
	cfg := config{
		listen: "127.0.0.1:0", store: filepath.Join(dir, "gateway.db"), state: filepath.Join(dir, "state"),
		sweep: time.Minute, grace: time.Minute,
	}
	change(&cfg)
	err := serve(ctx, cfg)
	return log.String(), err
}

func TestABadOptionIsRefused(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer listener.Close()
	for want, change := range map[string]func(*config){
		"-sweep 0s":          func(cfg *config) { cfg.sweep = 0 },
		"-grace -1s":         func(cfg *config) { cfg.grace = -time.Second },
		"TTL 1ns":            func(cfg *config) { cfg.ttl = 1 },
		"missing port":       func(cfg *config) { cfg.listen = "nonsense" },
		"already in use":     func(cfg *config) { cfg.listen = listener.Addr().String() },
		"neither a postgres": func(cfg *config) { cfg.store = "mysql://localhost/db" },
		"state dir":          func(cfg *config) { cfg.state = "" },
	} {
		_, err := serveFor(t, time.Minute, change)
		require.ErrorContains(t, err, want)
	}
}

func TestAGatewayCanBeStoppedWhileItWaitsForItsDatabase(t *testing.T) {
	const says = "waiting for the database"
	log, err := "", error(nil)
	for d := 300 * time.Millisecond; d < testkit.Patience && !strings.Contains(log, says); d *= 2 {
		log, err = serveFor(t, d, func(cfg *config) { cfg.store = "postgres://user:s3cret@127.0.0.1:1/db?password=s3cret" })
	}
	require.NoError(t, err)
	require.Contains(t, log, says)
	require.NotContains(t, log, "s3cret")
}
