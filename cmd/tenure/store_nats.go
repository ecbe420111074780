//go:build unix

package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tenurelib/tenure/natstenure"
)

// natsURL is a parsed nats:// URL.
type natsURL struct {
	hosts    []string
	options  []nats.Option // credentials and TLS
	stream   string
	replicas int
	synced   bool // the servers have sync_interval: always
}

// The parameters of a nats:// URL.
const natsParameters = "stream, replicas, sync, creds, nkey, tls, ca, cert and key"

// parseNATS parses a URL such as
//
//	nats://user:password@host-a:4222,host-b:4222/?stream=TENURE&replicas=3&sync=always&ca=/etc/nats/ca.pem
func parseNATS(text string) (natsURL, error) {
	at, err := parseURL(text)
	u := natsURL{hosts: at.hosts, stream: "TENURE", replicas: 1}
	if err != nil {
		return u, err
	}
	if at.path != "" {
		return u, errors.New("the store's URL has a path behind the host: the stream is a parameter, as in ?stream=NAME")
	}
	if at.user != nil {
		if password, ok := at.user.Password(); ok {
			u.options = append(u.options, nats.UserInfo(at.user.Username(), password))
		} else {
			u.options = append(u.options, nats.Token(at.user.Username()))
		}
	}
	if at.scheme == "tls" && at.parameters["tls"] == "" {
		at.parameters["tls"] = "required"
	}
	return u, u.set(at.parameters)
}

// set takes the parameters of the URL.
func (u *natsURL) set(parameters map[string]string) error {
	secure := false
	for name, value := range parameters {
		switch name {
		case "stream":
			if strings.ContainsAny(value, ` .*>/\$`) {
				return fmt.Errorf("stream=%s of the store's URL is not one token of a subject", value)
			}
			u.stream = value
		case "replicas":
			if _, err := fmt.Sscanf(value+"\n", "%d\n", &u.replicas); err != nil || u.replicas < 1 || u.replicas > 5 {
				return fmt.Errorf("replicas=%s of the store's URL is not a number from 1 to 5", value)
			}
		case "sync":
			if value != "always" {
				return fmt.Errorf("sync=%s of the store's URL is not always, the sync_interval that leases need", value)
			}
			u.synced = true
		case "tls":
			if value != "required" {
				return fmt.Errorf("tls=%s of the store's URL is not required", value)
			}
			secure = true
		case "creds", "nkey", "ca", "cert", "key":
			if err := readable(name, value); err != nil {
				return err
			}
		default:
			return fmt.Errorf("the store's URL has a parameter %q; nats: URLs have %s", name, natsParameters)
		}
	}
	if secure {
		u.options = append(u.options, nats.Secure(&tls.Config{MinVersion: tls.VersionTLS12}))
	}
	if file := parameters["creds"]; file != "" {
		u.options = append(u.options, nats.UserCredentials(file))
	}
	if file := parameters["nkey"]; file != "" {
		option, err := nats.NkeyOptionFromSeed(file)
		if err != nil {
			return fmt.Errorf("nkey of the store's URL: %s has no seed of an nkey", file)
		}
		u.options = append(u.options, option)
	}
	if file := parameters["ca"]; file != "" {
		u.options = append(u.options, nats.RootCAs(file))
	}
	cert, key := parameters["cert"], parameters["key"]
	if (cert == "") != (key == "") {
		return errors.New("cert of the store's URL needs key, and key needs cert")
	}
	if cert != "" {
		u.options = append(u.options, nats.ClientCert(cert, key))
	}
	options := nats.GetDefaultOptions()
	for _, option := range u.options {
		if err := option(&options); err != nil { // a file that can be read has something else in it
			return fmt.Errorf("a file that the store's URL names does not fit: %w", err)
		}
	}
	return nil
}

func (u natsURL) String() string {
	return fmt.Sprintf("stream %s on %s", u.stream, strings.Join(u.hosts, ","))
}

// natsStore is a store with a connection of its own.
type natsStore struct {
	*natstenure.Store
	nc  *nats.Conn
	url natsURL
	log *slog.Logger

	mu   sync.Mutex
	last error // that came from the server without an answer to a request, for example about a permission
}

func checkNATS(url string) error {
	_, err := parseNATS(url)
	if err != nil {
		return errUsage{err}
	}
	return nil
}

func describeNATS(url string) string {
	u, err := parseNATS(url)
	if err != nil { // a file of credentials has gone
		return "NATS"
	}
	return u.String()
}

// openNATS connects to a server. It waits for one that is down until ctx is done.
func openNATS(ctx context.Context, url string, _ *storeFlag, log *slog.Logger) (database, error) {
	u, err := parseNATS(url)
	if err != nil {
		return nil, err
	}
	s := &natsStore{url: u, log: log}
	options := append(slices.Clone(u.options),
		nats.Name("tenure"),
		nats.MaxReconnects(-1),
		nats.ReconnectWait(200*time.Millisecond),
		nats.IgnoreAuthErrorAbort(), // the server may get its new users later than this program its credentials
		nats.PingInterval(2*time.Second),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { s.note(err) }),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil { // nil: Close
				s.note(fmt.Errorf("the connection broke: %w", err))
			}
		}),
		nats.ReconnectHandler(func(nc *nats.Conn) {
			s.note(nil)
			log.Info("connected to NATS again", "server", nc.ConnectedAddr())
		}),
	)
	err = whenUp(ctx, "NATS", log, func() (down bool, err error) {
		s.nc, err = nats.Connect("nats://"+strings.Join(u.hosts, ",nats://"), options...)
		if err != nil {
			err = fmt.Errorf("no connection to NATS at %s: %w", strings.Join(u.hosts, ","), err)
		}
		return !refused(err), err
	})
	if err != nil {
		return nil, err
	}
	js, err := jetstream.New(s.nc)
	if err == nil {
		// Migrate says itself what is lost unless the servers sync always, in this program's terms.
		s.Store, err = natstenure.New(js, natstenure.Config{Stream: u.stream, Replicas: u.replicas, SyncAlways: true, Logger: log})
	}
	if err != nil {
		s.nc.Close()
		return nil, err
	}
	return s, nil
}

// refused reports whether a connection failed for a reason that waiting does not change.
func refused(err error) bool {
	for _, reason := range []error{nats.ErrAuthorization, nats.ErrAuthExpired, nats.ErrAuthRevoked, nats.ErrAccountAuthExpired,
		nats.ErrSecureConnRequired, nats.ErrSecureConnWanted, nats.ErrNkeysNotSupported} {
		if errors.Is(err, reason) {
			return true
		}
	}
	var certificate *tls.CertificateVerificationError
	return errors.As(err, &certificate)
}

// note keeps an error that answers no request, and logs it unless it is the last one again. Nil
// says that all is well.
func (s *natsStore) note(err error) {
	s.mu.Lock()
	again := s.last != nil && err != nil && s.last.Error() == err.Error()
	s.last = err
	s.mu.Unlock()
	if err != nil && !again {
		s.log.Warn("NATS reports an error", "error", oneLine(err))
	}
}

// Migrate creates the stream if it is missing.
func (s *natsStore) Migrate(ctx context.Context) error {
	if err := s.Store.Migrate(ctx); err != nil {
		return err
	}
	if !s.url.synced {
		s.log.Warn("unless the NATS servers run with sync_interval: always, a lease may be held twice after a power failure; " +
			"if they do, add sync=always to the parameters of the store's URL")
	}
	return nil
}

// explain adds to an error of the store what else is known, and the remedy.
func (s *natsStore) explain(err error) error {
	s.mu.Lock()
	last := s.last
	s.mu.Unlock()
	var api *jetstream.APIError
	switch {
	case errors.Is(err, jetstream.ErrStreamNotFound):
		return fmt.Errorf("there is no stream %s; unless its name is wrong, run \"tenure migrate\" with the same store", s.url.stream)
	case errors.Is(err, jetstream.ErrJetStreamNotEnabled), errors.Is(err, nats.ErrNoResponders):
		return fmt.Errorf("%w: NATS has no JetStream here: set jetstream in the server's config, and for the account", err)
	case last != nil && !errors.As(err, &api):
		return fmt.Errorf("%w (%s)", err, oneLine(last))
	}
	return err
}

// Close also closes the connection. It may be called twice.
func (s *natsStore) Close() error {
	err := s.Store.Close()
	s.nc.Close()
	return err
}
