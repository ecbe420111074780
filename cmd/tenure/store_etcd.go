//go:build unix

package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/etcdtenure"
)

// etcdURL is a parsed etcd:// or etcds:// URL.
type etcdURL struct {
	url    string // without credentials and parameters
	hosts  []string
	prefix string
	config clientv3.Config // credentials and TLS
}

// parseEtcd parses a URL such as
//
//	etcds://user:password@host-a:2379,host-b:2379/prefix?ca=/etc/etcd/ca.pem
func parseEtcd(text string) (etcdURL, error) {
	at, err := parseURL(text)
	if err != nil {
		return etcdURL{}, err
	}
	u := etcdURL{url: at.scheme + "://" + strings.Join(at.hosts, ",") + "/" + at.path, hosts: at.hosts, prefix: "tenure/"}
	if at.path != "" {
		path, err := url.PathUnescape(at.path)
		if err != nil || strings.Contains(at.path, "#") {
			return u, errors.New("the path of the store's URL cannot be parsed: write special characters as %XX")
		}
		u.prefix = strings.Trim(path, "/") + "/"
	}
	if at.user != nil {
		password, ok := at.user.Password()
		if !ok {
			return u, errors.New("the store's URL has a user without a password")
		}
		u.config.Username, u.config.Password = at.user.Username(), password
	}
	u.config.Logger = zap.NewNop() // what goes wrong is in the errors
	for name, value := range at.parameters {
		switch name {
		case "ca", "cert", "key":
			if at.scheme != "etcds" {
				return u, fmt.Errorf("%s of the store's URL needs TLS: begin the URL with etcds:", name)
			}
			if err := readable(name, value); err != nil {
				return u, err
			}
		default:
			return u, fmt.Errorf("the store's URL has a parameter %q; etcds: URLs have ca, cert and key", name)
		}
	}
	if at.scheme == "etcds" {
		u.config.TLS, err = tlsConfig(at.parameters)
	}
	return u, err
}

func tlsConfig(files map[string]string) (*tls.Config, error) {
	cfg := &tls.Config{MinVersion: tls.VersionTLS12}
	if file := files["ca"]; file != "" {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		cfg.RootCAs = x509.NewCertPool()
		if !cfg.RootCAs.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("ca of the store's URL: %s has no certificate", file)
		}
	}
	cert, key := files["cert"], files["key"]
	if (cert == "") != (key == "") {
		return nil, errors.New("cert of the store's URL needs key, and key needs cert")
	}
	if cert != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return nil, fmt.Errorf("cert and key of the store's URL: %w", err)
		}
		cfg.Certificates = []tls.Certificate{pair}
	}
	return cfg, nil
}

func (u etcdURL) String() string { return "prefix " + u.prefix + " on " + strings.Join(u.hosts, ",") }

func checkEtcd(url string) error {
	if _, err := parseEtcd(url); err != nil {
		return errUsage{err}
	}
	return nil
}

func describeEtcd(url string) string {
	u, err := parseEtcd(url)
	if err != nil { // a file of credentials has gone
		return "etcd"
	}
	return u.String()
}

// etcdStore is a store on etcd.
type etcdStore struct {
	*etcdtenure.Store
	url etcdURL
}

// etcdAttempt bounds an attempt to reach the servers.
const etcdAttempt = 2 * time.Second

// openEtcd waits for servers that are down until ctx is done.
func openEtcd(ctx context.Context, url string, _ *storeFlag, log *slog.Logger) (database, error) {
	u, err := parseEtcd(url)
	if err != nil {
		return nil, err
	}
	s := &etcdStore{url: u}
	err = whenUp(ctx, "etcd", log, func() (down bool, err error) {
		trying, cancel := context.WithTimeout(ctx, etcdAttempt)
		defer cancel()
		s.Store, err = etcdtenure.Open(trying, u.url, u.config, etcdtenure.Config{Logger: log})
		if err == nil {
			_, err = s.Get(trying, tenure.Key{Type: defaultType, ID: "any"})
			if errors.Is(err, tenure.ErrNotFound) || errors.Is(err, tenure.ErrSetup) { // it has answered
				return false, nil
			}
			if err != nil {
				s.Store.Close()
			}
		}
		if err == nil || errors.Is(err, tenure.ErrSetup) || errors.Is(err, tenure.ErrInvalid) {
			return false, err
		}
		return true, fmt.Errorf("no answer from etcd at %s: %w", strings.Join(u.hosts, ","), err)
	})
	if err != nil {
		return nil, err
	}
	return s, nil
}

// explain says what to do where nothing has been set up.
func (s *etcdStore) explain(err error) error {
	if errors.Is(err, tenure.ErrSetup) && strings.Contains(err.Error(), "call Migrate") {
		return fmt.Errorf("nothing is set up under the prefix %s; unless it is wrong, run \"tenure migrate\" with the same store", s.url.prefix)
	}
	return err
}
