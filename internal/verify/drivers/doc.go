// Package drivers has no code but tests: those that need drivers which the root module
// does not depend on.
package drivers
